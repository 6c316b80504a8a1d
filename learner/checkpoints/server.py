"""HTTP server of a node's checkpoints, for other nodes: complete directories below one root, and nothing else.

GET /health                       {"node": R}; no key
GET /checkpoints                  {"node": R, "held": {checkpoint: [file, ...]}}
GET /checkpoints/<name>/<file>    a file of the manifest, or the manifest; ranges

Keys and deadlines are those of every listener of a run (``weightstore/listener.py``).
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from tidemill.bus.http.access import Route
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, FileEntry
from tidemill.learner.checkpoints.peers import PATH
from tidemill.learner.errors import CheckpointCorrupt

log = logging.getLogger(__name__)

_KEPT_MANIFESTS = 8
"""Manifests in memory; that of a complete directory does not change, and names are not used again."""


class CheckpointServer:
    """Routes for ``Listener``."""

    def __init__(self, root: Path, *, node: int) -> None:
        self._root, self._node = root, node
        self._manifests: dict[str, Mapping[str, FileEntry]] = {}

    @property
    def routes(self) -> Mapping[str, Route]:
        """Routes of the server."""
        held, file = Route.request(self._held), Route.request(self._file)
        return {"GET /health": Route.open(self._health), f"GET {PATH}": held, f"GET {PATH}/{{name}}/{{file:.+}}": file}

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node})

    async def _held(self, request: web.Request) -> web.Response:
        return web.json_response({"node": self._node, "held": await asyncio.to_thread(held_below, self._root)})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Send a file. 404 for all but the files of complete checkpoints, wherever the path points."""
        name, file = request.match_info["name"], request.match_info["file"]
        path = await asyncio.to_thread(self._found, name, file)
        if path is None:
            raise web.HTTPNotFound(text=f"want a file of a checkpoint that this node has, got {name[:80]}/{file[:80]}\n")
        return web.FileResponse(path)

    def _found(self, name: str, file: str) -> Path | None:
        """Return the path of a file that may be sent."""
        try:
            directory = disk.named(Path(name)).path  # raises for other names
            if directory.name != name:  # an encoded slash
                return None
            directory = self._root / name
            if file != MANIFEST and file not in self._files(directory):
                return None
            path = (directory / file).resolve(strict=True)
        except (ValueError, OSError, CheckpointCorrupt):
            return None
        # The names of a manifest stay inside its directory; a symbolic link in it may not.
        return path if path.is_file() and path.is_relative_to(self._root.resolve()) else None

    def _files(self, directory: Path) -> Mapping[str, FileEntry]:
        if directory.name not in self._manifests:
            if len(self._manifests) >= _KEPT_MANIFESTS:
                self._manifests.clear()
            self._manifests[directory.name] = manifests.read(directory).files
        return self._manifests[directory.name]


def held_below(root: Path) -> dict[str, list[str]]:
    """Return the files of every checkpoint below ``root`` that are there with their size, and the manifest."""
    found = {}
    for one in disk.listed(root):
        try:
            found[one.path.name] = sorted([MANIFEST, *disk.held(one.path)])
        except CheckpointCorrupt as error:
            log.warning("checkpoint passed over: %s", error)
    return found
