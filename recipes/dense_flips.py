"""DenseFlipRateCallback: how often the masks of dense training would flip, the reference of every flip rate."""

import copy
from typing import Any, cast

from sparse24_kernels.masks import count_flips
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from hf_sparse24 import Sparse24Config, patch_model, sparse_run, sparse_weights
from hf_sparse24.methods import method_class
from hf_sparse24.patching.ownership import unwrap
from hf_sparse24.training.step_masks import fresh_masks, measuring_interval
from hf_sparse24.weights.sparse_weight import SparseWeight, first_of_each


class DenseFlipRateCallback(TrainerCallback):
    """Logs `flip_rate` while a dense model trains: the share of weights that entered or left the masks they would have.

    Give it to a plain `Trainer`; the model stays dense. Flips are measured as in sparse training: in step 1 and in
    those that log, or from one mask refresh to the next where the method changes masks there alone (`"t-sr-ste"`).
    ValueError: no config, or one of a method that keeps its masks; when training starts, a patched model.

    Reference: Hu et al. 2024 (arXiv 2404.01847), sections 3 and 4.3: sparse training should flip masks somewhat less.
    """

    def __init__(self, config: Sparse24Config):
        if not isinstance(config, Sparse24Config) or method_class(config.method).keeps_zeros:
            raise ValueError(f"config={config!r}: must be a Sparse24Config of a method whose masks change")
        self.config = config
        self._weights: dict[str, SparseWeight] = {}
        self._before: list[Tensor] = []
        self._rate: float | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        model = unwrap(kwargs["model"])
        if sparse_run(model) is not None:
            raise ValueError("the model is patched, and its own callback logs flip_rate; this one is for dense models")
        # The masks of a patched model without weights.
        absent = {id(tensor): nn.Parameter(tensor.to("meta")) for tensor in model.parameters()}
        sketch = copy.deepcopy(model, cast(dict[int, Any], absent))
        patch_model(sketch, self.config)
        self._weights = first_of_each(sparse_weights(sketch))
        self._before, self._rate = fresh_masks(self._weights, model), None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        is_measured = state.global_step == 0 or (state.global_step + 1) % measuring_interval(args, state) == 0
        if is_measured and not self._method.flips_at_refresh:
            self._before = fresh_masks(self._weights, unwrap(kwargs["model"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        is_refreshed = self._method.refreshes_state(state.global_step, state.max_steps)
        if not self._before or (self._method.flips_at_refresh and not is_refreshed):
            return
        after = fresh_masks(self._weights, unwrap(kwargs["model"]))
        sizes = sum(weight.parameter.numel() for weight in self._weights.values())
        self._rate = int(count_flips(self._before, after).sum()) / sizes
        self._before = after if self._method.flips_at_refresh else []

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs: Any):
        if "loss" in logs and self._rate is not None:
            logs["flip_rate"] = self._rate
            state.log_history[-1]["flip_rate"] = self._rate  # the Trainer has copied `logs` there already

    @property
    def _method(self) -> Any:
        return next(iter(self._weights.values())).method
