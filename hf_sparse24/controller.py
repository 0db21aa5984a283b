"""Sparse24Controller: everything that happens between steps, without any Trainer.

Forward decides nothing (gradient checkpointing repeats it, accumulation repeats it). What changes during training
changes here: phases, masks, the decay of pruned weights, the random streams of MVUE.
"""

from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor, nn

from .linear import Sparse24Layer
from .patching import patched_config, set_phase, sparse_layers
from .schedule import Schedule
from .step_adamw import StepAdamW


class Sparse24Controller:
    """Runs a patched model's sparsity in a training loop of your own.

    ```python
    patch_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    controller = Sparse24Controller(model, optimizer, total_steps=1000)
    for batch in data:
        for micro_batch in batch:
            model(**micro_batch).loss.backward()
            controller.after_micro_step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        controller.before_step()      # gradients are final: unscaled and clipped
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step()
    ```

    To resume, load the model's and the optimizer's `state_dict`, make the controller, then `load_state_dict`.

    Args:
        model: a patched model, plain or wrapped by DDP.
        optimizer: the optimizer of its trainable parameters.
        total_steps: optimizer steps of the whole run, finished ones included.
        seed: of MVUE's random streams, >= 0. Give every process its own (`seed + rank`), so that they draw
            independently.
        step: optimizer steps already done, when resuming.
        metrics_interval: the flip rate is measured at steps 1 and every multiple of this; measuring costs two mask
            computations.

    Raises:
        ValueError: the model is not patched, the schedule does not fit `total_steps`, a trainable patched weight is
            not in the optimizer, method "step" without a `StepAdamW`, `masked_decay="auto"` (only `Sparse24Trainer`
            determines it), or a weight is sharded (a DTensor), which this version does not support.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        *,
        seed: int = 0,
        step: int = 0,
        metrics_interval: int = 1,
    ):
        self.layers = sparse_layers(model)
        if not self.layers:
            raise ValueError("the model is not patched; call patch_model(model) first")
        self.model, self.seed, self.metrics_interval = model, seed, metrics_interval
        self.config = patched_config(model)
        if self.config.masked_decay == "auto":
            raise ValueError("masked_decay='auto': only Sparse24Trainer determines it; give the controller a number")
        self.schedule = Schedule.from_config(self.config, total_steps)
        self._groups = _groups_of_weights(self.layers, optimizer)
        self._step_optimizer = _step_optimizer(optimizer) if self.config.method == "step" else None
        self.step = step
        self.micro_step = 0
        self._flips: dict[str, Tensor] = {}
        self._masks_before: dict[str, Tensor] = {}
        self._rng_keys = _share_rng_keys(list(self.layers.values()))
        self._enter_phase()
        for layer in self.layers.values():
            if not layer.state_is_ready:
                layer.init_state()
        self._set_rng_keys()

    @property
    def phase(self) -> str:
        """`"sparse"` or `"dense"`: how the model computes in the step that comes next.

        What the schedule says; with STEP, dense before its optimizer has switched.
        """
        if self._step_optimizer is not None and not self._step_optimizer.switched:
            return "dense"
        return self.schedule.phase(self.step)

    def after_micro_step(self) -> None:
        """Call after the backward pass of each micro-batch, so that the next one draws other MVUE samples.

        The call after an optimizer step's last micro-batch may be left out: `after_step` starts afresh.
        """
        self.micro_step += 1
        self._set_rng_keys()

    @torch.no_grad()
    def before_step(self) -> None:
        """Call right before `optimizer.step()`, once gradients are unscaled and clipped: applies the masked decay."""
        measures = (self.step + 1) % self.metrics_interval == 0 or self.step == 0
        # Methods that search masks now and then flip only when they search: `_search_masks` measures that.
        keeps_masks = measures and self.schedule.mask_interval is None
        decay = (self.config.masked_decay or 0.0) if self.phase == "sparse" else 0.0
        targets, weights, masks, alphas = [], [], [], []
        for name, layer in _first_of_each_weight(self.layers).items():
            weight, grad = layer.weight, layer.weight.grad
            decays = decay > 0 and grad is not None
            if not decays and not keeps_masks:
                continue
            # On a GPU bits: an eighth of the memory. On a CPU packing costs more than it saves.
            mask = layer.mask(packed=keeps_masks or weight.is_cuda)
            if keeps_masks:
                self._masks_before[name] = mask
            if decays:
                on_gradient = self.config.decay_on == "gradient"
                targets.append(grad if on_gradient else weight)
                weights.append(weight)
                masks.append(mask)
                alphas.append(decay if on_gradient else -decay * self._groups[name]["lr"])
        kernels.foreach_masked_decay_(targets, weights, masks, alphas)
        for layer in self.layers.values():
            layer.operands.clear()  # stale after the step, and the optimizer can use the memory

    @torch.no_grad()
    def after_step(self) -> None:
        """Call right after `optimizer.step()`: counts the step, switches the phase, searches masks."""
        self.step += 1
        self.micro_step = 0
        if self._masks_before:
            self._flips = self._count_flips(self._masks_before)
            self._masks_before = {}
        if self.phase != self.config.phase:
            self._enter_phase()
        elif self.schedule.searches_mask(self.step):
            self._search_masks()
        elif self.config.scale_frozen is False and self.phase == "sparse":
            for layer in self.layers.values():
                layer.init_state()
        self._set_rng_keys()

    def metrics(self) -> dict[str, float]:
        """What to log now.

        Returns:
            `sparse_phase`: 1.0 while sparse, 0.0 while dense. `kept_magnitude`: share of the patched weights' L1 norm
            that the masks keep. `flip_rate`: share of patched weights that entered or left the mask in the last
            measured step, or, where masks are searched every so often, in the last search; absent before the first.
        """
        kept = total = torch.zeros(())
        for layer in self.layers.values():
            magnitude = layer.weight.detach().float().abs()
            kept = kept + (magnitude * layer.mask()).sum().cpu()
            total = total + magnitude.sum().cpu()
        values = {"sparse_phase": float(self.phase == "sparse"), "kept_magnitude": float(kept / total.clamp(min=1e-38))}
        if self._flips:
            sizes = sum(self.layers[name].weight.numel() for name in self._flips)
            values["flip_rate"] = float(sum(self._flips.values())) / sizes
        return values

    def layer_flip_rates(self) -> dict[str, float]:
        """`flip_rate` layer by layer, as last measured; a weight that layers share stands under the first of them."""
        return {name: float(flips) / self.layers[name].weight.numel() for name, flips in self._flips.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the controller needs to go on, as plain numbers. Masks and scales are in the model's `state_dict`."""
        return {"step": self.step, "micro_step": self.micro_step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; load the model's own `state_dict` first."""
        self.step, self.micro_step, self.seed = state["step"], state["micro_step"], state["seed"]
        set_phase(self.model, self.phase)
        self._set_rng_keys()

    def _enter_phase(self) -> None:
        """Set the phase of the current step; state starts from the weights when it turns sparse."""
        for layer in self.layers.values():
            if self.phase == "sparse" and layer.phase == "dense":
                layer.init_state()
        set_phase(self.model, self.phase)

    def _search_masks(self) -> None:
        before = {name: layer.mask(packed=True) for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.init_state()
        self._flips = self._count_flips(before)

    def _count_flips(self, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """Per layer, how many weights have entered or left the mask since."""
        after = [self.layers[name].mask(packed=True) for name in before]
        return dict(zip(before, kernels.count_flips(list(before.values()), after)))

    def _set_rng_keys(self) -> None:
        for indices, keys in self._rng_keys:
            values = [_mix(self.seed, self.step, self.micro_step, index) for index in indices]
            keys.copy_(torch.tensor(values, dtype=torch.int64))


def _groups_of_weights(layers: dict[str, Sparse24Layer], optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The optimizer's param group of each layer's weight; frozen weights have none."""
    owners = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    groups = {}
    for name, layer in layers.items():
        if type(layer.weight.data) is not Tensor:
            kind = type(layer.weight.data).__name__
            raise ValueError(f"{name}.weight is a {kind}: this version trains plain tensors (no FSDP2, no TP)")
        if id(layer.weight) in owners:
            groups[name] = owners[id(layer.weight)]
        elif layer.weight.requires_grad:
            raise ValueError(
                f"the optimizer does not hold {name}.weight, which is trainable; make the optimizer from this model's "
                f"parameters, or freeze the weight"
            )
    return groups


def _step_optimizer(optimizer: torch.optim.Optimizer) -> StepAdamW:
    """The optimizer itself, or the one that accelerate has wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, StepAdamW):
        raise ValueError(
            f"method 'step' is an optimizer as much as a mask, and {type(inner).__name__} is not it: use "
            f"StepAdamW(step_param_groups(model), ...), or leave the optimizer to Sparse24Trainer"
        )
    return inner


def _first_of_each_weight(layers: dict[str, Sparse24Layer]) -> dict[str, Sparse24Layer]:
    """The layers without those that share an earlier layer's weight: a gradient is decayed once."""
    first = {}
    for name, layer in layers.items():
        first.setdefault(id(layer.weight), name)
    return {name: layers[name] for name in first.values()}


def _share_rng_keys(layers: list[Sparse24Layer]) -> list[tuple[list[int], Tensor]]:
    """Give each layer a scalar of one int64 tensor per device, so that a micro-step costs one copy to it.

    Returns:
        Per device, the indices of its layers and their keys.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, layer in enumerate(layers):
        by_device.setdefault(layer.weight.device, []).append(index)
    shared = []
    for device, indices in by_device.items():
        keys = torch.zeros(len(indices), dtype=torch.int64, device=device)
        for index, key in zip(indices, keys.unbind()):
            layers[index].rng_key = key
        shared.append((indices, keys))
    return shared


def _mix(*numbers: int) -> int:
    """A 63-bit hash of a few integers (the finaliser of splitmix64), so that nearby numbers give unrelated streams."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1
