"""A Hub in a folder: the calls of `HfApi` that pushes make, with the signatures of the real one."""

import inspect
import shutil
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError


def _as_the_real_one(function: Any) -> Any:
    """Record the call, and refuse arguments that `HfApi` would refuse."""

    @wraps(function)
    def call(self: "FakeHub", *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(getattr(HfApi, function.__name__)).bind(self, *args, **kwargs)
        self.calls.append(function.__name__)
        if function.__name__ in self.errors:
            raise self.errors[function.__name__]
        return function(**bound.arguments)

    return call


class FakeHub:
    """Repositories are folders below `root`, each with a folder for every revision.

    Attributes:
        calls: names of the methods that were called.
        messages: those of the commits, by repository.
        private: what repositories were made with.
        errors: what a method raises, by its name.
    """

    def __init__(self, root: Path, user: str = "ada"):
        self.root, self.user = root, user
        self.calls: list[str] = []
        self.messages: dict[str, list[str]] = {}
        self.private: dict[str, bool | None] = {}
        self.errors: dict[str, Exception] = {}

    def folder(self, repo_id: str, revision: str | None = None) -> Path:
        return self.root / repo_id / (revision or "main").replace("/", "-")

    def files(self, repo_id: str, revision: str | None = None) -> dict[str, bytes]:
        folder = self.folder(repo_id, revision)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    @_as_the_real_one
    def create_repo(self, repo_id: str, private: bool | None = None, **_: Any) -> Any:
        repo_id = repo_id if "/" in repo_id else f"{self.user}/{repo_id}"
        if repo_id not in self.messages:
            self.messages[repo_id], self.private[repo_id] = [], private
            self.folder(repo_id).mkdir(parents=True)
        return SimpleNamespace(repo_id=repo_id)

    @_as_the_real_one
    def create_branch(self, repo_id: str, branch: str, **_: Any) -> None:
        if not self.folder(repo_id, branch).exists():
            shutil.copytree(self.folder(repo_id), self.folder(repo_id, branch))

    @_as_the_real_one
    def list_repo_files(self, repo_id: str, revision: str | None = None, **_: Any) -> list[str]:
        return sorted(self.files(repo_id, revision))

    @_as_the_real_one
    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None, **_: Any) -> str:
        path = self.folder(repo_id, revision) / filename
        if not path.exists():
            raise RemoteEntryNotFoundError("404", response=Mock(headers={}))
        return str(path)

    @_as_the_real_one
    def create_commit(
        self,
        repo_id: str,
        operations: Any,
        commit_message: str,
        revision: str | None = None,
        create_pr: Any = None,
        **_: Any,
    ) -> CommitInfo:
        if create_pr:
            revision = "refs/pr/1"
            shutil.copytree(self.folder(repo_id), self.folder(repo_id, revision))
        for operation in operations:
            path = self.folder(repo_id, revision) / operation.path_in_repo
            if isinstance(operation, CommitOperationAdd):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(operation.path_or_fileobj, path)
            else:
                path.unlink()
        self.messages[repo_id].append(commit_message)
        url = f"https://huggingface.co/{repo_id}/commit/{len(self.messages[repo_id])}"
        return CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid=url[-1])

    @_as_the_real_one
    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str, **_: Any) -> Any:
        shutil.copytree(
            folder_path, self.folder(repo_id), dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint-*")
        )
        self.messages[repo_id].append(commit_message)
        return SimpleNamespace(done=lambda: True, result=lambda: None)
