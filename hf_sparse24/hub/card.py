"""The model card: what a sparse model is, how to load it, how it was trained, and how it compares with a dense one."""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedModel

from ..config import Sparse24Config
from ..extensions import adapters_in
from ..methods import ONESHOT_METHOD, method_class
from ..metrics import is_nm_sparse
from ..packed_format import check_values
from ..patching.ownership import unwrap
from ..patching.report import shown_count
from ..progress import get_logger
from ..run import SparseRun, sparse_run
from ..tables import markdown_table, shown_patterns
from ..version import __version__
from ..weights.sharding import rank
from ..weights.sparse_weight import first_of_each, sparse_weights
from ..weights.storage import TRAINED
from .picture import Logs, by_step, last_evaluation, metrics_of, write_picture

logger = get_logger(__name__)

Format = Literal["dense", "packed", "training"]

CARD = "README.md"
BEGIN = "<!-- hf_sparse24: begin. The next push replaces this part, and keeps what stands outside of it. -->"
END = "<!-- hf_sparse24: end -->"
_METADATA = {*inspect.signature(ModelCardData).parameters, "base_model_relation"} - {"ignore_metadata_errors", "kwargs"}


@torch.no_grad()
def make_model_card(
    model: PreTrainedModel,
    *,
    format: Format = "dense",
    values: str = "float",
    model_id: str | None = None,
    tags: str | Iterable[str] | None = None,
    log_history: Logs = (),
    results: Mapping[str, float] | None = None,
    dense_control: Mapping[str, float] | None = None,
    control_name: str = "dense control",
    hyperparameters: Mapping[str, object] | None = None,
    plot: str | None = None,
    existing: ModelCard | None = None,
    **metadata: Any,
) -> ModelCard:
    """The model card of a patched model. For an export, computes all sparse weights to count their zeros.

    Args:
        model: a patched model of Transformers.
        format: of the model's files: an export, `"dense"` or `"packed"`, or a `"training"` checkpoint.
        values: of a packed export, `"float"` or `"int8"`.
        model_id: the repository, as `from_pretrained` takes it; None for the name of the model's class.
        tags: in addition to those of this library and of `model.add_model_tags`.
        log_history: of the run, as `trainer.state.log_history` has it, for the results.
        results: metrics of this model by name; None for the last evaluation in `log_history`.
        dense_control: the same metrics of a dense run, such as what its `trainer.evaluate()` returned.
        control_name: what that is, as the head of its column: `"dense model"` for the model before it was pruned.
        hyperparameters: of the training, by name.
        plot: file name or URL of a picture of the training.
        existing: the card that is there.
        metadata: what `huggingface_hub.ModelCardData` takes, such as `license` and `datasets`; `base_model_relation`.

    Returns:
        The card, with this library's part between two comments; of `existing`, everything outside them stays.

    Raises:
        ValueError: the model is not patched, or the format or `values` is unknown.
        TypeError: neither an argument nor metadata of a card.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model, Sparse24Config(method="fixed-mask"))
        >>> card = make_model_card(model, model_id="me/gpt2-sparse", license="mit", results={"eval_loss": 3.2})
        >>> card.save("README.md")
    """
    run = sparse_run(model)
    if run is None:
        raise ValueError("the model is not patched, so there is no sparsity to describe; call patch_model(model) first")
    check_arguments(format, metadata, values)
    name = " ".join((model_id or type(model).__name__).rpartition("/")[2].split())
    given = {key: value for key, value in metadata.items() if value is not None}
    base_model = given.get("base_model") or _base_model(model, model_id)
    ours = last_evaluation(by_step(log_history)) if results is None else dict(results)
    is_dense = _is_dense(model, run, format)
    parts = [
        _summary(model, run, base_model, format, is_dense),
        _loading(model, run, format, values, model_id or name),
        "" if is_dense or format != "dense" else _training_on(run.config),
        _results(metrics_of(ours), metrics_of(dense_control or {}), control_name),
        _training(run, hyperparameters, plot),
        f"Written by hf_sparse24 {__version__}, with Transformers {transformers.__version__} and PyTorch "
        f"{torch.__version__}.",
    ]
    section = "\n\n".join([BEGIN, *filter(None, parts), END])
    derived = {"library_name": "transformers", "model_name": name}
    if base_model:
        derived |= {"base_model": base_model, "base_model_relation": "finetune"}
    card = ModelCard(f"---\n{{}}\n---\n\n# {name}\n" if existing is None else existing.content)
    data: Any = card.data
    for key, value in [*((key, value) for key, value in derived.items() if data.get(key) is None), *given.items()]:
        data[key] = value  # the caller's; where not given the author's, and else what the model says
    asked = [tags] if isinstance(tags, str) else tags or []
    patterns = [f"{weight.pattern}-sparsity" for weight in sparse_weights(model, TRAINED).values()]
    of_sparse = [*dict.fromkeys(patterns), "semi-structured-sparsity"]
    found = [*(data.tags or []), "hf_sparse24", *of_sparse, *(model.model_tags or []), *asked]
    data.tags = [tag for tag in dict.fromkeys(found) if not (is_dense and tag in of_sparse)]
    card.text = _replaced(card.text, section)
    return card


def write_model_card(model: PreTrainedModel, directory: Path, **details: Any) -> None:
    """Write `README.md` to a directory, with the picture of the training where `log_history` has losses."""
    picture = write_picture(directory, details.get("log_history", ()))
    make_model_card(model, **({"plot": picture.name if picture else None} | details)).save(directory / CARD)


def describe_checkpoint(model: Any, directory: Any, repo_id: str | None) -> None:
    """Say in a directory's card that its model is a training checkpoint, pushed to `repo_id`; None: not pushed."""
    model = unwrap(model)
    is_whole = isinstance(model, PreTrainedModel) and not adapters_in(model)
    if not is_whole or sparse_run(model) is None or rank() != 0:
        return
    path = Path(directory) / CARD
    card = read_card(path, str(path))
    make_model_card(model, format="training", model_id=repo_id or path.parent.name, existing=card).save(path)
    if repo_id is not None:
        text = "this pushes a training checkpoint, whose weights are dense where hf_sparse24 is not imported: push the "
        text += "export by hf_sparse24.push_to_hub(model, repo_id), or by Sparse24Trainer with hub_strategy='end'"
        logger.warning_once(text)  # type: ignore[attr-defined]  # Transformers adds it


def describe_export(model: Any, directory: Path, format: Any, values: str) -> str:
    """The `README.md` of an export to a directory, with what its author wrote there."""
    existing, name = read_card(directory / CARD, str(directory / CARD)), directory.resolve().name
    return str(make_model_card(model, format=format, values=values, model_id=name, existing=existing))


def read_card(path: Path, name: str) -> ModelCard | None:
    """The card in a file, None where there is none. ValueError, which says `name`: its metadata cannot be read."""
    try:
        return ModelCard(path.read_bytes().decode("utf-8-sig")) if path.exists() else None  # with its ends of lines
    except Exception as error:  # of the reader of YAML too
        raise ValueError(f"the metadata of {name} cannot be read, correct it first: {error}") from error


def check_arguments(format: str, details: Iterable[str], values: str = "float") -> None:
    """Raise the errors of `make_model_card` for unknown arguments."""
    if format not in get_args(Format):
        raise ValueError(f"format={format!r}: must be one of {list(get_args(Format))}")
    check_values(values, format)
    unknown = sorted({*details} - _METADATA - {*inspect.signature(make_model_card).parameters})
    if unknown:
        raise TypeError(f"{unknown[0]!r} is neither an argument nor metadata of a model card: {sorted(_METADATA)}")


def _is_dense(model: nn.Module, run: SparseRun, format: Format) -> bool:
    """Whether a model computes with dense weights: in a dense phase, or where an export has its method's adapters."""
    weights = sparse_weights(model, TRAINED).values() if run.phase != "sparse" and format != "training" else ()
    return run.is_dense or not all(is_nm_sparse(one.merged(), *one.pattern, one.input_dim) for one in weights)


def _summary(model: nn.Module, run: SparseRun, base: str | list[str] | None, format: Format, is_dense: bool) -> str:
    patterns = [weight.pattern for weight in sparse_weights(model, TRAINED).values()]
    shown = shown_patterns(patterns)
    names = [base] if isinstance(base, str) else base or []
    what = f"A Transformers model, made from {', '.join(names)}" if names else "A Transformers model"
    if is_dense:
        how = "in a dense phase" if run.is_dense else "with adapters of its method merged"
        state = f"That training has ended {how}" if run.facts.finished else f"It was saved {how}"
        trained = f"{what}, that hf_sparse24 trains with sparse weights ({shown})"
        return f"{trained}. {state}: **its weights are dense**."
    is_one = len({*patterns}) == 1
    kind, m, zero = (patterns[0], patterns[0].m, patterns[0].m - patterns[0].n) if is_one else ("N:M", "M", "M - N")
    sparse = (
        f"{what}, with **{kind} sparse weights** by hf_sparse24: of every {m} consecutive weights along the input "
        f"dimension of a sparse layer, {zero} are zero{'' if is_one else f' ({shown})'}."
    )
    if format == "training":  # the master weights are dense
        return sparse
    weights = first_of_each(sparse_weights(model, TRAINED)).values()
    dropped = sum(weight.storage.numel - weight.master.numel() for weight in weights)
    total = sum(parameter.numel() for parameter in model.parameters()) + dropped
    zero = sum(int((weight.merged() == 0).sum()) for weight in weights)
    return f"{sparse} {zero / total:.1%} of all {_number(total)} parameters are zero."


def _loading(model: nn.Module, run: SparseRun, format: Format, values: str, model_id: str) -> str:
    name, options = type(model).__name__, ""
    if not hasattr(transformers, name):
        name, options = getattr(model, "_auto_class", None) or "AutoModel", ", trust_remote_code=True"
    source = json.dumps(model_id, ensure_ascii=False)  # as a Python string too: with quotes, backslashes, newlines
    load = [f"from transformers import {name}", "", f"model = {name}.from_pretrained({source}{options})"]
    export = 'For weights that load everywhere, `hf_sparse24.export_model(model, "directory")` writes an export.'
    stored = "int8 values, a scale for each row and 128 weights," if values == "int8" else "values,"
    text = ["Without hf_sparse24, in Transformers and in other engines: the weights are ordinary tensors."]
    text += [_python(*load)]
    if format == "packed" or (format == "training" and run.facts.packed is not None):
        text = [
            f"The sparse weights are packed: their {stored} and a mask of one bit a weight. **Reading them takes "
            "hf_sparse24**:",
            _python("import hf_sparse24  # tells Transformers how to read packed weights", *load),
            f"Transformers by itself cannot read them. {export}",
        ]
    elif format == "training":
        text = [
            "This is a training checkpoint: the dense master weights, and what the method keeps with them. **Import "
            "hf_sparse24 before you load it**:",
            _python("import hf_sparse24  # without this line, another model computes", *load),
            f"Otherwise Transformers warns of an unknown quantization type, and loads dense weights. {export}",
        ]
    return "\n\n".join(["## How to load it", *text])


def _training_on(config: Sparse24Config) -> str:
    fields = config.fields() if config.method == ONESHOT_METHOD else vars(config) | {"method": ONESHOT_METHOD}
    defaults = Sparse24Config(ONESHOT_METHOD).fields() | {"method": None}
    given = [f"{name}={fields[name]!r}" for name in defaults if fields.get(name, defaults[name]) != defaults[name]]
    text = "To train on while the zeros stay where they are, pass this of hf_sparse24 to `from_pretrained` too:"
    return f"{text}\n\n" + _python(f"quantization_config = Sparse24Config({', '.join(given)})")


def _results(ours: Mapping[str, float], dense: Mapping[str, float], control_name: str) -> str:
    columns = ["metric", "this model", *([control_name, "difference"] if dense else [])]
    rows = []
    for name in {**ours, **dense}:
        cells = [_number(run[name]) if name in run else "" for run in (ours, dense)]
        cells.append(f"{ours[name] - dense[name]:+.4g}" if all(cells) else "")
        rows.append([name.removeprefix("eval_").replace("_", " "), *cells][: len(columns)])
    return f"## Results\n\n{markdown_table(columns, rows)}" if rows else ""


def _training(run: SparseRun, hyperparameters: Mapping[str, object] | None, plot: str | None) -> str:
    config, pruning = run.config, run.facts.pruning
    home = sys.modules.get(method_class(config.method).__module__)  # None where `exec` made the class
    about = (home and home.__doc__) or ""  # the method card, see CONTRIBUTING.md
    title = about.strip().partition("\n")[0]
    paper = re.search(r"arXiv (\d{4}\.\d{4,5})", about.partition("Reference")[2])
    link = f" ([arXiv {paper[1]}](https://arxiv.org/abs/{paper[1]}))" if paper else ""
    settings = [f"    {key}={value!r}," for key, value in config.fields().items()]
    parts = ["## Training", f"Method `{config.method}`{link}. {title}", _python("Sparse24Config(", *settings, ")")]
    if pruning:
        rows = [[name, _number(value) if type(value) is int else str(value)] for name, value in pruning.items()]
        parts += ["Masks and weights began with those of `oneshot`:", markdown_table(["oneshot", "value"], rows)]
    if hyperparameters:
        rows = [[name.replace("_", " "), str(value)] for name, value in hyperparameters.items()]
        parts.append(markdown_table(["hyper-parameter", "value"], rows))
    if plot:
        parts.append(f"![Losses, flip rate and kept magnitude by the step]({plot})")
    return "\n\n".join(parts)


def _base_model(model: PreTrainedModel, model_id: str | None) -> str | None:
    """The repository that the model was loaded from; None where it was a directory, or is `model_id` itself."""
    name = model.config.name_or_path or ""
    is_repository = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not Path(name).exists()
    return name if is_repository and name != model_id else None


def _replaced(text: str, section: str) -> str:
    """The text with our section in place of the one that it has, or at its end."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return f"{before}{section}{after}"
    return f"{text.replace(BEGIN, '').rstrip()}\n\n{section}\n"


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _number(value: float) -> str:
    return shown_count(value) if isinstance(value, int) else f"{value:.4g}"
