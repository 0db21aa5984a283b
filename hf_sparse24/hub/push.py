"""push_to_hub uploads the export of a sparse model, or on request its training checkpoint, with a model card.

A push is one commit: the repository has the old files or the new ones. Every push of the same model makes the same
files, and the Hub keeps what has reached it, so a push that broke off is resumed by the same call.
"""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import RemoteEntryNotFoundError
from transformers import PreTrainedModel
from transformers.modelcard import extract_hyperparameters_from_trainer

from ..checkpoints.export import WEIGHT_FILES, export_model, unwrapped
from ..checkpoints.lazy_tensors import NOT_FINITE
from ..extensions import extensions
from ..patching.refusals import reject_non_finite
from ..run import patched_config
from ..weights.sharding import is_sharded, rank
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED
from .card import CARD, Format, check_arguments, describe_checkpoint, describe_export, read_card, write_model_card
from .picture import draw_training

_CARD_NAMES = {"dataset_tags": "datasets", "finetuned_from": "base_model", "model_name": "model_id"}
"""Arguments of `Trainer.create_model_card` and what `make_model_card` calls them; it has no `_NOT_IN_CARDS`."""
_NOT_IN_CARDS = ("tasks", "dataset", "dataset_args", "blocking")


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    format: Format = "dense",
    values: str = "float",
    processing_class: Any = None,
    commit_message: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "5GB",
    tags: str | Iterable[str] | None = None,
    **card: Any,
) -> CommitInfo | None:
    """Upload an export of a patched model, with a model card, to the Hub. `model.push_to_hub(repo_id)` does the same.

    The repository is made if it is not there. Its card keeps what its author wrote, weight files that the export
    replaces go, other files stay. Of several processes only the first one pushes.

    Args:
        model: as of `export_model`.
        repo_id: `"user/name"`, or `"name"` for a repository under your own name.
        format: `"dense"` or `"packed"`, see `export_model`; or `"training"`, what `save_pretrained` writes, which
            computes the same only where hf_sparse24 is imported.
        values: as of `export_model`.
        processing_class: a tokenizer or processor to upload with it.
        commit_message: None for what was uploaded.
        private: whether a repository that is made here is private; None for your organisation's default.
        token: of the Hub; None or True for the one that you are logged in with.
        revision: a branch to commit to; None for `"main"`.
        create_pr: open a pull request with the commit instead.
        max_shard_size: as of `export_model`.
        tags: of the card, in addition to those of this library.
        card: what `make_model_card` takes: `license`, `datasets`, `results`, `dense_control` and others.

    Returns:
        Where the commit is, in the process that pushed; None in the others.

    Raises:
        ValueError: the model is not patched, or cannot be exported (see `export_model`), or a name is no valid one.
        HfHubHTTPError: of huggingface_hub, where the Hub refuses, as without a token that may write.
    """
    if patched_config(model) is None:
        raise ValueError(f"the model is not patched; use {type(model).__name__}.push_to_hub(model, {repo_id!r})")
    check_arguments(format, card, values)
    model = unwrapped(model)
    for name, weight in sparse_weights(model, TRAINED).items():
        if is_sharded(weight.master):
            way = "call export_model(model, directory) in all of them, then push the directory with `hf upload`"
            raise ValueError(f"{name} is sharded, and one process pushes: {way}")
    reject_non_finite(model.named_parameters(), NOT_FINITE)
    if rank() != 0:
        return None
    repo_id = HfApi().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    card = {"model_id": repo_id, "existing": _card_on_hub(repo_id, token, revision), "tags": tags} | card
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if format == "training":
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        else:
            export_model(model, folder, format, max_shard_size, values)
        write_model_card(model, folder, format=format, values=values, **card)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        message = commit_message or ("Upload training checkpoint" if format == "training" else "Upload model")
        commit = {"commit_message": message, "token": token, "revision": revision, "create_pr": create_pr}
        return _commit(folder, repo_id, commit)


def _upload_modified_files(model: PreTrainedModel, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    """Transformers' end of every push by `save_pretrained`; its card does not say how to load the model."""
    describe_checkpoint(model, working_dir, repo_id)
    return type(model)._upload_modified_files(model, working_dir, repo_id, *args, **kwargs)


def push_run(trainer: Any, model: PreTrainedModel, options: Mapping[str, Any]) -> CommitInfo | None:
    """Push a Trainer's model with its run in the card; `options` are those of `push_to_hub`, or of the Trainer's."""
    args, hyperparameters = trainer.args, extract_hyperparameters_from_trainer(trainer)
    hyperparameters.pop("optimizer", None)  # that of the arguments; the method may have made another
    asked = {
        "repo_id": trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).resolve().name,
        "token": args.hub_token,
        "private": args.hub_private_repo,
        "revision": args.hub_revision,
        "processing_class": trainer.processing_class,
        "log_history": trainer.state.log_history,
        "hyperparameters": hyperparameters,
    }
    given = {_CARD_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    asked |= {name: value for name, value in given.items() if name not in _NOT_IN_CARDS}
    return push_to_hub(model, **asked)


extensions.describe_checkpoint, extensions.draw_training = describe_checkpoint, draw_training
extensions.describe_export, extensions.push_run = describe_export, push_run
extensions.model_methods |= {"push_to_hub": push_to_hub, "_upload_modified_files": _upload_modified_files}


def _commit(folder: Path, repo_id: str, commit: dict[str, Any]) -> CommitInfo:
    """Upload the files of a folder, and delete the other weight files of the repository.

    In one commit: `HfApi.upload_folder` makes several of a large folder, and between them nothing would load.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # `from_pretrained` would take a model.safetensors that is left there, and not the new shards.
    present = HfApi().list_repo_files(repo_id, revision=commit["revision"], token=commit["token"])
    outdated = [name for name in present if WEIGHT_FILES.fullmatch(name) and name not in files]
    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    deleted = [CommitOperationDelete(path_in_repo=name) for name in outdated]
    return HfApi().create_commit(repo_id, [*added, *deleted], **commit)


def _card_on_hub(repo_id: str, token: bool | str | None, revision: str | None) -> ModelCard | None:
    """The card in a repository on the Hub, None where it has none. A branch that is not there is made."""
    if revision is not None and not revision.startswith("refs/pr/"):
        HfApi().create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    try:
        path = HfApi().hf_hub_download(repo_id, CARD, token=token, revision=revision)
    except RemoteEntryNotFoundError:  # not where the Hub cannot be reached: the card there would be lost
        return None
    return read_card(Path(path), f"{CARD} of {repo_id}")
