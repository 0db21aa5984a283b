"""A Hub on this machine: the part of its HTTP protocol that pushing and loading models needs, in memory, for tests.

The client is the real huggingface_hub; the server is the standard library's, in a thread. Files above a size go through
Git LFS, in one PUT. `broken` lets requests fail as networks and servers do.
"""

import base64
import hashlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SIZE = 4096
"""Larger files are LFS objects."""


@dataclass(frozen=True)
class File:
    """A file of a commit: its bytes, or the name of an LFS object."""

    oid: str
    size: int
    content: bytes | None = None


@dataclass
class Repo:
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: bool = False

    def commit(self, ref: str, files: dict[str, File], message: str) -> str:
        sha = hashlib.sha1(repr((len(self.commits), ref, message)).encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class Cut(Exception):
    """Close the connection without an answer."""


class HubServer(ThreadingHTTPServer):
    """To look at: `repos`, `objects` (of LFS, by SHA-256), `requests` (as `"PUT /lfs/..."`), `users` (by token)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.users = {"hf_writer": "ada"}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Callable[[str], None]] = []
        self.lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator["HubServer"]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    @contextmanager
    def broken(self, pattern: str, fault: Exception, first: int = 0, last: int = sys.maxsize) -> Iterator[None]:
        """Of the requests that `pattern` matches, those from the `first`-th to the `last`-th end with `fault`."""
        numbers = itertools.count()

        def check(request: str) -> None:
            if re.search(pattern, request) and first <= next(numbers) <= last:
                raise fault

        self.faults.append(check)
        try:
            yield
        finally:
            self.faults.remove(check)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The content of a repository."""
        repo = self.repos[repo_id]
        files = repo.commits[repo.refs[revision]]
        return {path: self.content(file) for path, file in files.items()}

    def content(self, file: File) -> bytes:
        return self.objects[file.oid] if file.content is None else file.content

    def handle_error(self, request, client_address) -> None:
        """A client that went away is no error of the tests."""


class HTTPError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        request = f"{self.command} {unquote(url.path)}"
        try:
            self.body = self.read_body()
            with self.server.lock:
                self.server.requests.append(request)
            for fault in self.server.faults:
                fault(request)
            for pattern, method in ROUTES:
                match = re.fullmatch(pattern, f"{self.command} {url.path}")
                if match:
                    method(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
                    return
            raise HTTPError(404, f"no such page: {request}")
        except Cut:
            self.close_connection = True
        except HTTPError as error:
            headers = {"X-Error-Message": error.message, "X-Error-Code": error.code}
            self.reply({"error": error.message}, error.status, {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = do_PUT = do

    def end_headers(self) -> None:
        # A connection for each request: no client finds one closed that another thread's broken answer has ended.
        self.send_header("Connection", "close")
        self.close_connection = True
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def user(self) -> str | None:
        """Who asks; None for nobody.

        Raises:
            HTTPError: nobody has this token.
        """
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if not kind:
            return None
        if token not in self.server.users:
            raise HTTPError(401, "Invalid username or password.")
        return self.server.users[token]

    def repo(self, repo_id: str, write: bool = False) -> Repo:
        user = self.user()
        owns = user == repo_id.partition("/")[0]
        repo = self.server.repos.get(repo_id)
        if repo is None or (repo.private and not owns):
            raise HTTPError(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not owns:
            raise HTTPError(403, f"You don't have the rights to write to {repo_id}")
        return repo

    def revision(self, repo: Repo, revision: str) -> str:
        sha = repo.sha(revision)
        if sha is None:
            raise HTTPError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def create_repo(self) -> None:
        asked, user = json.loads(self.body), self.user()
        repo_id = f"{asked.get('organization') or user}/{asked['name']}"
        if user is None:
            raise HTTPError(401, "Invalid username or password.")
        if user != repo_id.partition("/")[0]:
            raise HTTPError(403, f"You don't have the rights to create a model under the namespace {repo_id}")
        url = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if repo_id in self.server.repos:
            return self.reply(url | {"error": "You already created this model repo"}, 409)
        repo = self.server.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": regular(b"*.safetensors filter=lfs\n")}, "initial commit")
        self.reply(url)

    def create_branch(self, repo_id: str, branch: str) -> None:
        repo = self.repo(repo_id, write=True)
        if branch in repo.refs:
            raise HTTPError(409, "Reference already exists")
        repo.refs[branch] = self.revision(repo, json.loads(self.body).get("startingPoint", "main"))
        self.reply({})

    def info(self, repo_id: str, revision: str = "") -> None:
        repo = self.repo(repo_id)
        sha = self.revision(repo, revision or "main")
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        self.reply({"id": repo_id, "sha": sha, "siblings": siblings, "tags": [], "private": repo.private})

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        repo = self.repo(repo_id)
        files = repo.commits[self.revision(repo, revision)]
        found = {path: file for path, file in files.items() if not folder or path.startswith(f"{folder}/")}
        if not found:
            raise HTTPError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        self.reply(
            [
                {"type": "file", "path": path, "size": file.size, "oid": file.oid}
                | ({} if file.content is not None else {"lfs": {"oid": file.oid, "size": file.size, "pointerSize": 9}})
                for path, file in found.items()
            ]
        )

    def preupload(self, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write="create_pr" not in self.query)
        files = repo.commits[self.revision(repo, revision)]
        self.reply(
            {
                "files": [
                    {
                        "path": asked["path"],
                        "uploadMode": "lfs" if asked["size"] > LFS_SIZE else "regular",
                        "shouldIgnore": False,
                        "oid": files[asked["path"]].oid if asked["path"] in files else None,
                    }
                    for asked in json.loads(self.body)["files"]
                ]
            }
        )

    def lfs_batch(self, repo_id: str) -> None:
        self.repo(repo_id)
        self.reply({"transfer": "basic", "objects": [self.lfs_object(o) for o in json.loads(self.body)["objects"]]})

    def lfs_object(self, asked: dict) -> dict:
        url = f"{self.server.url}/lfs/{asked['oid']}"
        if asked["oid"] in self.server.objects:
            return asked
        return asked | {"actions": {"upload": {"href": url}}}

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HTTPError(400, "the content does not have this SHA-256")
        self.server.objects[oid] = self.body
        self.reply({})

    def commit(self, repo_id: str, revision: str) -> None:
        wants_pr = "create_pr" in self.query
        repo = self.repo(repo_id, write=not wants_pr)
        files = dict(repo.commits[self.revision(repo, revision)])
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = regular(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise HTTPError(400, f"the LFS object of {value['path']} was not uploaded")
                files[value["path"]] = File(value["oid"], value["size"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise HTTPError(400, f"unknown operation {operation['key']}")
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        sha = repo.commit(f"refs/pr/{number}" if wants_pr else revision, files, header["value"]["summary"])
        self.reply(
            {
                "commitUrl": f"{self.server.url}/{repo_id}/commit/{sha}",
                "commitOid": sha,
                "pullRequestUrl": f"{self.server.url}/{repo_id}/discussions/{number}" if wants_pr else None,
            }
        )

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.repo(repo_id)
        sha = self.revision(repo, revision)
        headers = {"X-Repo-Commit": sha}
        file = repo.commits[sha].get(path)
        if file is None:
            return self.reply({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{file.oid}"'
        self.reply(self.server.content(file), 200, headers)

    def whoami(self) -> None:
        user = self.user()
        if user is None:
            raise HTTPError(401, "Invalid username or password.")
        self.reply({"type": "user", "name": user, "orgs": []})

    def validate_yaml(self) -> None:
        self.reply({"errors": [], "warnings": []})


def regular(content: bytes) -> File:
    """A file as Git has it, with Git's name for its content."""
    return File(hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), len(content), content)


_REPO = r"(?P<repo_id>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (r"POST /api/repos/create", Handler.create_repo),
    (r"POST /api/validate-yaml", Handler.validate_yaml),
    (r"GET /api/whoami-v2", Handler.whoami),
    (rf"GET /api/models/{_REPO}(/revision/(?P<revision>[^/]+))?", Handler.info),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)/?(?P<folder>.*)", Handler.tree),
    (rf"POST /api/models/{_REPO}/branch/(?P<branch>.+)", Handler.create_branch),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"POST /{_REPO}[.]git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /lfs/(?P<oid>\w+)", Handler.lfs_put),
    (rf"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]
