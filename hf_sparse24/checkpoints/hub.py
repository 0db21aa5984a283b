"""push_to_hub uploads the export of a sparse model, or on request its training checkpoint, with a model card.

A push is one commit: the repository has the old files or the new ones. Every push of the same model makes the same
files, and the Hub keeps what has reached it, so a push that broke off is resumed by the same call.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RemoteEntryNotFoundError
from transformers import PreTrainedModel

from ..adapters.merging import adapters_in, without_adapters
from ..patching.ownership import MODEL_METHODS
from ..run import patched_config
from ..version import __version__
from ..weights.sharding import is_sharded, rank
from ..weights.sparse_weight import sparse_weights
from .card import CARD, Format, check_arguments, write_model_card
from .export import WEIGHT_FILES, export_model, unwrapped


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    format: Format = "dense",
    processing_class: Any = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
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
        model: a patched model; DDP, DataParallel and torch.compile are looked through, and PEFT's active adapters are
            merged for the push.
        repo_id: `"user/name"`, or `"name"` for a repository of your own.
        format: `"dense"`: ordinary weights with zeros, which load everywhere. `"packed"`: 9/16 of the bytes, read with
            hf_sparse24. `"training"`: what `save_pretrained` writes, to go on training, and which computes the same
            only where hf_sparse24 is imported; the card says so.
        processing_class: a tokenizer or processor to upload with it.
        commit_message: the first line of the commit; None for what was uploaded.
        commit_description: the rest of its message.
        private: whether a repository that is made here is private; None for your organisation's default.
        token: of the Hub; None or True for the one that you are logged in with.
        revision: a branch to commit to; None for `"main"`.
        create_pr: open a pull request with the commit instead.
        max_shard_size: bytes of one file at most, such as `"5GB"`.
        tags: of the card, in addition to those of this library.
        card: what `make_model_card` takes: `license`, `datasets`, `results`, `dense_control` and others.

    Returns:
        Where the commit is, in the process that pushed; None in the others.

    Raises:
        ValueError: the model is not patched, or cannot be exported (see `export_model`), or a name is no valid one.
        PermissionError: the Hub refuses, as without a token that may write.
        ConnectionError: the Hub cannot be reached, or the connection broke off; the same call goes on from there.
    """
    if patched_config(model) is None:
        raise ValueError(f"the model is not patched; use {type(model).__name__}.push_to_hub(model, {repo_id!r})")
    check_arguments(format, card)
    model = unwrapped(model)
    reject_sharded(model)
    if format == "training" and adapters_in(model):
        raise ValueError("format='training': the model has PEFT adapters, which model.push_to_hub of PEFT pushes")
    if rank() != 0:
        return None
    with readable_errors(repo_id):
        repo_id = hub_api().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    card |= {"model_id": repo_id, "tags": tags, "existing": card_on_hub(repo_id, token, revision)}
    with tempfile.TemporaryDirectory() as folder:
        with without_adapters(model) as plain:
            stage_model(cast(PreTrainedModel, plain), Path(folder), format, processing_class, max_shard_size, **card)
        return commit_folder(
            Path(folder),
            repo_id,
            commit_message=commit_message or ("Upload training checkpoint" if format == "training" else "Upload model"),
            commit_description=commit_description,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )


def reject_sharded(model: PreTrainedModel) -> None:
    """Raise ValueError where the weights are sharded over processes: only one of them pushes."""
    for name, weight in sparse_weights(model).items():
        if is_sharded(weight.master):
            raise ValueError(
                f"{name} is sharded, and one process pushes: call export_model(model, directory) in all of them, then "
                f"push the directory with `hf upload`"
            )


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict | None = None,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    **kwargs: Any,
) -> None:
    """`PreTrainedModel.save_pretrained`; `push_to_hub=True` pushes what it saves, with the card of a checkpoint."""
    upload = {key: kwargs.pop(key) for key in ("commit_message", "create_pr", "private") if key in kwargs}
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **kwargs)
    if push_to_hub and is_main_process:
        repo_id = repo_id or Path(save_directory).name
        _push(model, repo_id, format="training", token=kwargs.get("token"), **upload)


_push = push_to_hub  # an argument of save_pretrained has its name
MODEL_METHODS.update(push_to_hub=push_to_hub, save_pretrained=save_pretrained)


def hub_api() -> HfApi:
    return HfApi(library_name="hf_sparse24", library_version=__version__)


def stage_model(
    model: PreTrainedModel,
    folder: Path,
    format: Format,
    processing_class: Any = None,
    max_shard_size: int | str = "5GB",
    **card: Any,
) -> None:
    """Write the files that a push uploads to an empty folder; `card` is what `write_model_card` takes."""
    if format == "training":
        type(model).save_pretrained(model, folder, max_shard_size=max_shard_size)
    else:
        export_model(model, folder, format, max_shard_size)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    write_model_card(model, folder, format=format, **card)


def card_on_hub(repo_id: str, token: bool | str | None, revision: str | None) -> ModelCard | None:
    """The card in a repository on the Hub, None where it has none. A branch that is not there is made.

    Raises:
        ValueError: its metadata cannot be read.
    """
    with readable_errors(repo_id):
        if revision is not None and not revision.startswith("refs/pr/"):
            hub_api().create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        try:
            path = hub_api().hf_hub_download(repo_id, CARD, token=token, revision=revision)
        except RemoteEntryNotFoundError:  # not where the Hub cannot be reached: the card there would be lost
            return None
    return _read_card(Path(path), f"{CARD} of {repo_id}")


def card_in(directory: Path) -> ModelCard | None:
    """The card in a directory, None where it has none.

    Raises:
        ValueError: its metadata cannot be read.
    """
    path = directory / CARD
    return _read_card(path, str(path)) if path.exists() else None


def _read_card(path: Path, called: str) -> ModelCard:
    try:
        return ModelCard(path.read_bytes().decode("utf-8-sig"))  # with the ends of lines that it has
    except Exception as error:  # of the reader of YAML too
        raise ValueError(f"the metadata of {called} cannot be read, correct or remove it first: {error}") from error


def commit_folder(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    commit_description: str | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Upload the files of a folder, and delete the other weight files of the repository, in one commit."""
    api = hub_api()
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    with readable_errors(repo_id):
        # `from_pretrained` would take a model.safetensors that is left there, and not the shards beside it.
        present = api.list_repo_files(repo_id, revision=revision, token=token)
        outdated = [name for name in present if WEIGHT_FILES.fullmatch(name) and name not in files]
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
                *(CommitOperationDelete(path_in_repo=name) for name in outdated),
            ],
            commit_message=commit_message,
            commit_description=commit_description,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )


@contextmanager
def readable_errors(repo_id: str) -> Iterator[None]:
    """Raise PermissionError or ConnectionError, with the way out, where calls of the Hub in the block fail.

    The ValueError of huggingface_hub for wrong arguments stays as it is.
    """
    try:
        yield
    except (ValueError, PermissionError):
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        answer = next((cause.response for cause in causes if isinstance(cause, HfHubHTTPError)), None)
        if isinstance(error, LocalTokenNotFoundError) or (answer is not None and answer.status_code in (401, 403, 404)):
            reason = "" if answer is None else answer.headers.get("X-Error-Message") or "no right to write there"
            said = "" if answer is None else f"the Hub answers {answer.status_code}, {reason}; "
            raise PermissionError(
                f"cannot push to {repo_id}: {said}log in with a token that may write there (`hf auth login`), or pass "
                f"token="
            ) from error
        reasons = ", caused by ".join(f"{type(cause).__name__}: {cause}" for cause in causes).rstrip(".")
        raise ConnectionError(
            f"the push to {repo_id} broke off: {reasons}. No commit was made; the same call goes on from here: it "
            f"sends only the files that the Hub does not have yet"
        ) from error
