"""A hub of models and data sets on this machine, with the requests that ``huggingface_hub`` makes: information, lists
of files, files with ranges, uploads. It can cut, stall and falsify what it sends.

Knows nothing of Tidemill. Source of the requests: the library's own client, 2.4.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

LARGE = (".safetensors", ".parquet")
"""Ends of files that lie behind a redirect, by their SHA-256."""
FILES_HOST = {"127.0.0.1": "localhost", "hub.invalid": "files.invalid"}
"""Host of large files by host of the hub. The client itself follows a redirect that stays at the hub's."""
ANSWER_S = 30.0


@dataclass
class Repo:
    """A repository with its commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    """The only token that opens it; empty = public."""
    gated: bool = False
    private: bool | None = None
    """As it was asked for when it was created here."""

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files alone, and return its hash."""
        text = json.dumps([len(self.commits), {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[branch] = commit
        return commit


class Hub:
    """The server, and what it has seen."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[tuple[str, str, Mapping[str, str]]] = []
        """Method, path and headers of every request."""
        self.cut: dict[bytes, int] = {}
        """Content -> bytes after which its next answer is cut."""
        self.stall: dict[bytes, int] = {}
        """Content -> bytes after which its next answer goes on only when the client has gone."""
        self.sent: dict[bytes, bytes] = {}
        """Content -> other content that its next answer has."""
        self.uploads: dict[str, bytes] = {}
        self.rubbish: bytes | None = None
        """Content of every answer about a repository, in place of its own."""
        self.url = ""

    def repo(self, name: str, kind: str = "model") -> Repo:
        return self.repos.setdefault((kind, name), Repo())

    def ranges(self, path: str) -> list[str]:
        """Return the header Range of each GET whose path begins so; empty text = the whole file."""
        asked = [headers for method, its, headers in self.requests if method == "GET" and its.startswith(path)]
        return [headers.get("Range", "") for headers in asked]

    # ---- answers

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._noted])
        for prefix, kind in (("", "model"), ("/datasets", "dataset")):
            at = f"/api/{kind}s/{{org}}/{{name}}"
            app.router.add_get(at, self._info)
            app.router.add_get(at + "/revision/{revision}", self._info)
            app.router.add_get(at + "/tree/{revision}", self._tree)
            app.router.add_post(at + "/preupload/{revision}", self._preupload)
            app.router.add_post(at + "/commit/{revision}", self._commit)
            app.router.add_get(prefix + "/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/large/{digest}", self._large)
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/validate-yaml", self._valid)
        app.router.add_post("/{org}/{name}.git/info/lfs/objects/batch", self._batch)
        app.router.add_put("/upload/{oid}", self._upload)
        return app

    @web.middleware
    async def _noted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path, dict(request.headers)))
        return await handler(request)

    def _found(self, request: web.Request) -> tuple[Repo, str]:
        """Return the repository and the commit of a request. Raises the hub's answers to a wrong one."""
        kind = "dataset" if request.path.startswith(("/api/datasets", "/datasets")) else "model"
        repo = self.repos.get((kind, f"{request.match_info['org']}/{request.match_info['name']}"))
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token == "wrong":
            raise web.HTTPUnauthorized(headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo is None or (repo.token and repo.token != token):
            raise (web.HTTPNotFound if token else web.HTTPUnauthorized)(headers={"X-Error-Code": "RepoNotFound"})
        revision = request.match_info.get("revision", "main")
        commit = revision if revision in repo.commits else repo.refs.get(revision)
        if commit is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return repo, commit

    async def _info(self, request: web.Request) -> web.Response:
        if self.rubbish is not None:
            return web.Response(body=self.rubbish)
        repo, commit = self._found(request)
        siblings = []
        for path, data in repo.commits[commit].items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _blob_digest(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        repo_id = f"{request.match_info['org']}/{request.match_info['name']}"
        return web.json_response({"id": repo_id, "sha": commit, "siblings": siblings, "tags": []})

    async def _tree(self, request: web.Request) -> web.Response:
        repo, commit = self._found(request)
        files = []
        for path, data in repo.commits[commit].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _blob_digest(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            files.append(entry)
        return web.json_response(files)

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        repo, commit = self._found(request)
        if repo.gated:
            raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo"})
        path = request.match_info["path"]
        data = repo.commits[commit].get(path)
        if data is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit}
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            host, _, port = request.host.partition(":")
            place = f"{request.scheme}://{FILES_HOST.get(host, host)}:{port or 80}/large/{digest}"
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "Location": place}
            return web.Response(status=302, headers=headers)
        return await self._send(request, data, headers | {"ETag": f'"{_blob_digest(data)}"'})

    async def _large(self, request: web.Request) -> web.StreamResponse:
        every = (data for repo in self.repos.values() for files in repo.commits.values() for data in files.values())
        data = next(data for data in every if hashlib.sha256(data).hexdigest() == request.match_info["digest"])
        return await self._send(request, data, {"ETag": f'"{request.match_info["digest"]}"'})

    async def _send(self, request: web.Request, whole: bytes, headers: dict[str, str]) -> web.StreamResponse:
        begin = request.http_range.start or 0
        if begin >= len(whole) > 0:
            raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{len(whole)}"})
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
        data = whole if request.method == "HEAD" else self.sent.pop(whole, whole)
        answer = web.StreamResponse(status=206 if begin else 200, headers=headers)
        answer.content_length = len(data) - begin
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        cut, stall = self.cut.pop(whole, None), self.stall.pop(whole, None)
        data = data[begin:]
        await answer.write(data[: next((end for end in (cut, stall) if end is not None), len(data))])
        if stall is not None:
            assert request.transport is not None
            gone = asyncio.Event()
            with contextlib.suppress(asyncio.CancelledError):  # when the client has gone
                await gone.wait()
        elif cut is not None:
            assert request.transport is not None
            request.transport.close()
        return answer

    # ---- uploads

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if not request.headers.get("Authorization"):
            raise web.HTTPUnauthorized
        name = f"{asked['organization']}/{asked['name']}"
        if (asked.get("type", "model"), name) in self.repos:
            error = {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            raise web.HTTPConflict(text=json.dumps(error), content_type="application/json")
        repo = self.repo(name)
        repo.private = asked.get("visibility") == "private"
        repo.commit({})
        return web.json_response({"url": f"{self.url}/{name}", "id": name})

    async def _valid(self, request: web.Request) -> web.Response:
        await request.json()
        return web.json_response({"errors": [], "warnings": []})

    async def _preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        return web.json_response({"files": modes})

    async def _batch(self, request: web.Request) -> web.Response:
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.url}/upload/{entry['oid']}", "header": {}}}}
            for entry in (await request.json())["objects"]
        ]
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _upload(self, request: web.Request) -> web.Response:
        self.uploads[request.match_info["oid"]] = await request.read()
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        repo, before = self._found(request)
        files = dict(repo.commits[before])
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                files[entry["value"]["path"]] = self.uploads[entry["value"]["oid"]]
        commit = repo.commit(files)
        repo_id = f"{request.match_info['org']}/{request.match_info['name']}"
        return web.json_response({"commitOid": commit, "commitUrl": f"{self.url}/{repo_id}/commit/{commit}"})


def _blob_digest(data: bytes) -> str:
    """Return git's digest of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub from a thread of its own while entered."""
    hub, loop, ready = Hub(), asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(hub.app(), access_log=None, shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, name="hub")
    thread.start()
    assert ready.wait(ANSWER_S)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(ANSWER_S)


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory by their relative paths."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
