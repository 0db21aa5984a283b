"""The quantizer that patches models in `from_pretrained`; importing this module registers it with Transformers.

`config.json` of a patched model has its `Sparse24Config` as `quantization_config`, so with `hf_sparse24` imported,
`from_pretrained` returns a patched model. Without the import, Transformers warns of an unknown quantization type and
loads the dense master weights. What it saves then has the same `config.json`; the files of weights lack a `MARKER`.
"""

from collections.abc import Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer

from ..config import SavedConfig, Sparse24Config
from ..extensions import adapters_in, extensions
from ..facts import MARKER
from ..packed_format import PACKED_INDEX, PackedFormat
from ..patching import ownership
from ..patching.masters import packed_config
from ..patching.packing import mark_packed
from ..patching.refusals import reject_non_finite
from ..patching.surgery import patch_model
from ..run import SparseRun, sparse_run, wants_packed_master
from ..weights.sharding import check_supported, is_sharded
from ..weights.sparse_weight import SparseWeight, sparse_weights, wrong_states
from ..weights.storage import PACKED
from .packed_files import check_files, check_packed, make_packed
from .safetensors_file import read_headers

register_quantization_config("sparse24")(SavedConfig)
# `from_pretrained(sparse_checkpoint, quantization_config=other)` is then refused, by `other.get_loading_attributes()`.
if hasattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES"):
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (SavedConfig, Sparse24Config)  # type: ignore[assignment]  # of fixed length


@register_quantizer("sparse24")
class Sparse24Quantizer(HfQuantizer):
    """Patches a model while `from_pretrained` loads it, from a sparse or a dense checkpoint."""

    is_compileable = True
    names_in_files: Set[str] = frozenset()  # not where the user passes a state_dict
    run: SparseRun | None = None  # of packed masters

    def __init__(self, quantization_config: SavedConfig | Sparse24Config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        # What a dense checkpoint is patched by; a run begins with it, so it has no facts of another one.
        config = quantization_config.config if isinstance(quantization_config, SavedConfig) else quantization_config
        self.saved = SavedConfig(config)
        if self.pre_quantized and isinstance(quantization_config, SavedConfig):
            self.saved = quantization_config
        self.packed: PackedFormat | None = self.saved.facts.packed  # None where no weight is packed
        self.has_packed_master = wants_packed_master(config)
        self.is_late = False  # whether a dense checkpoint is loaded first, and the model patched then

    def update_attn_implementation(self, config):
        # What Transformers calls with the model's config before it looks for files.
        ownership.name_parts(config, None)
        if self.packed is not None and hasattr(config, "transformers_weights"):  # not where save_pretrained wrote it
            config.transformers_weights = PACKED_INDEX
        return config

    update_tp_plan = update_attn_implementation  # in Transformers up to 5.20

    def _process_model_before_weight_loading(self, model: PreTrainedModel, checkpoint_files=None, **kwargs) -> None:
        files = checkpoint_files or ()  # none where the user passes a state_dict
        # Transformers would initialise the weights of custom code again, where the method's state is not in the files.
        is_custom = not type(model).__module__.startswith("transformers.")  # `is_custom_code`, which 5.11 lacks
        if self.packed is not None:
            self.names_in_files = check_files(self.packed, files) if files else frozenset()
            self.run = SparseRun(self.saved.config) if self.has_packed_master else None
            make_packed(model, self.packed, self.run)
            return
        self.names_in_files = frozenset(read_headers(file for file in files if str(file).endswith(".safetensors"))[0])
        self.is_late = self.has_packed_master or (not self.pre_quantized and is_custom)
        if not self.is_late:
            self._patch(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs) -> PreTrainedModel:
        tp_size = getattr(model, "_tp_size", None) or 1
        if self.has_packed_master and tp_size > 1:
            way = "use DDP or FSDP2 (fully_shard), or master='dense'"
            raise ValueError(f"master='packed': tensor parallelism does not split the places of packed weights; {way}")
        if self.packed is not None:
            self._finish_packed(model, self.packed)
        elif self.is_late:
            del model.config.quantization_config
            ownership.forget_quantizer(model)
            patch_model(model, self.saved.config)
        else:
            self._finish(model, tp_size)
        return model

    def _patch(self, model: PreTrainedModel) -> None:
        """Patch a model on the meta device, and tell Transformers how to load what the method keeps."""
        config = self.saved.config
        if self.pre_quantized and isinstance(config.exclude_modules, list):  # a head, which `AutoModel` lacks
            own = {name.rpartition(".")[2] for name, _ in model.named_modules()}
            present = [name for name in config.exclude_modules if name.rpartition(".")[2] in own]
            config = config.replace(exclude_modules=present or None)
        patch_model(model, config)
        facts = self.saved.facts
        cast(SparseRun, sparse_run(model)).record(phase=facts.phase, finished=facts.finished, pruning=facts.pruning)
        weights = sparse_weights(model, every_name=True)
        for weight in weights.values():
            # Transformers' tensor parallelism then runs the layer's forward on this process's part of input and weight,
            # in training too, and leaves the sums over processes to itself.
            weight.module._hf_quantized_needs_local_tp = True  # type: ignore[assignment]  # of no Module
        tensors = _method_tensors(weights)
        # State stays fp32 whatever dtype the weights are loaded in.
        state = {name for name, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *state}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), MARKER}
        if not self.pre_quantized:
            # A dense checkpoint has none of them, and the load report need not call them missing.
            patterns = {rf"^{name.replace('.', r'[.]')}$" for name in tensors}
            model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *patterns}

    def _finish(self, model: PreTrainedModel, tp_size: int) -> None:
        """Check what was read into a patched model, or make the state that a dense checkpoint lacks."""
        weights = sparse_weights(model)
        for name, weight in weights.items():
            check_supported(name, weight.master)  # Transformers has split it by now
            weight.storage.is_split = tp_size > 1 and is_sharded(weight.parameter)
        reject_non_finite((name, weight.parameter) for name, weight in weights.items())
        if self.pre_quantized:
            self._check_state(model, weights)
        else:
            for weight in weights.values():
                weight.init_state(with_parameters=True)
        for weight in weights.values():
            weight.split_state()
        # Transformers has put its own config object there; the model's is the one that its run writes.
        model.config.quantization_config = cast(SparseRun, sparse_run(model)).saved
        ownership.forget_quantizer(model)  # the weights are ordinary

    def _check_state(self, model: PreTrainedModel, weights: dict[str, SparseWeight]) -> None:
        """Raise ValueError where the files lacked state of the method, or had what the method cannot have made."""
        # Transformers marks what it read from a file. What it did not read is uninitialised memory.
        tensors = _method_tensors(sparse_weights(model, every_name=True))
        missing = [name for name, x in tensors.items() if not getattr(x, "_is_hf_initialized", False)]
        has_marker = any(name.endswith(MARKER) for name in self.names_in_files)
        missing += [MARKER] if self.saved.facts.marked and self.names_in_files and not has_marker else []
        if missing:
            raise ValueError(
                f"the checkpoint says it is {self.saved.config.method!r} trained, but lacks {missing[:5]}: saved "
                f"without hf_sparse24, or damaged; load another, or remove quantization_config from config.json"
            )
        for weight in weights.values():
            weight.state.is_ready = True
        if wrong := wrong_states(weights):
            raise ValueError(f"the checkpoint is damaged, copy or download it again: {wrong}")

    def _finish_packed(self, model: PreTrainedModel, packed: PackedFormat) -> None:
        weights = sparse_weights(model, PACKED)
        check_packed(model, weights, self.names_in_files)
        model.config.__dict__.pop("transformers_weights", None)  # of these files, not of the model
        if self.run is not None:
            self.run.record(pruning=self.saved.facts.pruning)
            ownership.write_config(model, self.run)
            ownership.list_masters(model, self.run)
            ownership.forget_quantizer(model)  # the values are an ordinary Parameter
        else:
            # Of no export, and without the heads that the model's class lacks.
            own = PackedFormat(ownership.packed_patterns(model), packed.values)
            self.quantization_config = packed_config(self.saved, own)
            mark_packed(model, self.quantization_config)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return self.packed is None  # packed weights do not train, adapters around them do

    def get_state_dict_and_metadata(self, model, *args):
        ownership.match_config(model)  # save_pretrained of a packed model calls it before it writes
        return super().get_state_dict_and_metadata(model, *args)

    def update_weight_conversions(self, weight_conversions, *args):
        # Packed tensors have the names of the model's own state_dict, however other checkpoints call the weights.
        return weight_conversions if self.packed is None else []


def save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
) -> None:
    """`save_pretrained` of the model's class, with a `MARKER` in the weights of a training checkpoint."""
    ownership.match_config(model)
    first, run = next(iter(sparse_weights(model)), None), sparse_run(model)
    if run is None:  # all that was sparse has been replaced
        return type(model).save_pretrained(model, save_directory, is_main_process, state_dict=state_dict, **kwargs)
    # Transformers writes other tensors than these for adapters, and where it has distributed the model itself.
    is_distributed = getattr(model.config, "distributed_config", None) or (getattr(model, "_tp_size", None) or 1) > 1
    is_distributed = is_distributed or kwargs.get("distributed_checkpoint")
    if first and run and not is_distributed and not adapters_in(model):
        state_dict = dict(model.state_dict() if state_dict is None else state_dict)
        state_dict[f"{first.rpartition('.')[0]}.{MARKER}"] = torch.ones(1, dtype=torch.uint8, device="cpu")
        # In the architecture's own format experts are split, and fused layers joined, which a method's state cannot be.
        kwargs.setdefault("save_original_format", False)
        run.record(marked=True)
    try:
        ownership.name_parts(model.config, type(model).__name__)
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict=state_dict, **kwargs)
    finally:
        ownership.name_parts(model.config, None)
        if run:
            run.record(marked=False)


extensions.model_methods["save_pretrained"] = save_pretrained


def _method_tensors(weights: dict[str, SparseWeight]) -> dict[str, Tensor]:
    """The buffers and Parameters of the method, by their names in a checkpoint."""
    states = (weight.state.in_model(name) for name, weight in weights.items())
    return {name: tensor for state in states for name, tensor in state.items()}
