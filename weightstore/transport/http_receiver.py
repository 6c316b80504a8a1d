"""An engine over HTTP, with SGLang's paths and bodies; SGLang ignores the additions ``epoch`` and ``timeout_s``."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import aiohttp

from tidemill.bus.errors import Fenced
from tidemill.bus.http.client import ApiClient, CallFailed, Failure
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.format.adapters import AdapterHeader, in_request
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import TensorSpec
from tidemill.weightstore.transport.parts import Buckets, Payload, RemoteBucket
from tidemill.weightstore.transport.port import Deadlines, Rendezvous

STALE_EPOCH = 409  # Status of an engine that has seen a newer learner; the ``epoch`` of that one is in the answer
# Statuses of an engine without checksums: plain SGLang has no such path, and some layouts cannot be compared
NOT_SUPPORTED = (404, 405, 501)


class HttpReceiver:
    """``tidemill.weightstore.transport.port.WeightReceiver`` for one engine URL. The session belongs to the caller."""

    carries = False
    adapters = True

    def __init__(self, session: aiohttp.ClientSession, url: str, *, epoch: int, deadlines: Deadlines) -> None:
        self._api = ApiClient(url, self._error, session=session, connect_s=deadlines.phase_s)
        self.url, self._epoch, self._deadlines = self._api.url, epoch, deadlines
        self._groups: list[str] = []  # Names of the process groups, in the order of the parts of the weights
        self._version = -1

    async def join(self, rendezvous: Rendezvous | None) -> None:
        """Leave a group of the same name, then POST /init_weights_update_group."""
        assert rendezvous is not None
        if rendezvous.name not in self._groups:
            self._groups.append(rendezvous.name)
        with suppress(ReceiverFailed):  # destroy a stale group if there is one; "unknown group" is expected
            await self._leave(rendezvous.name)
        await self._post(
            "init_weights_update_group",
            {
                "master_address": rendezvous.host,
                "master_port": rendezvous.port,
                "rank_offset": rendezvous.rank,
                "world_size": rendezvous.world_size,
                "group_name": rendezvous.name,
                "backend": rendezvous.backend,
            },
        )

    async def begin(self, version: int, adapter: AdapterHeader | None = None) -> None:
        """POST /begin_weight_update; the later requests of the push repeat the version."""
        self._version = version
        await self._post("begin_weight_update", {"weight_version": str(version)} | in_request(adapter), phase="begin")

    async def bucket(self, specs: Sequence[TensorSpec], flat: Payload) -> None:
        """POST /update_weights_from_distributed with the specs; bytes come over the group of the rank that has them."""
        group = self._groups[flat.part.number if isinstance(flat, RemoteBucket) else 0]
        body = {
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(self._version),
        }
        await self._post("update_weights_from_distributed", body | _specs(specs), phase="bucket")

    async def receive(
        self, version: int, buckets: Buckets, *, serve: bool, adapter: AdapterHeader | None = None
    ) -> float | None:
        """POST /receive_push, which SGLang lacks, with the specs of all buckets. Returns seconds with ``serve``, else
        None.

        A bucket that comes over another group than rank 0's names it.
        """
        self._version = version
        sent = [
            _specs(bucket.specs) | ({"group_name": self._groups[bucket.part]} if bucket.part else {})
            for bucket, _ in buckets
        ]
        body = {
            "group_name": next(iter(self._groups), ""),
            "weight_version": str(version),
            "buckets": sent,
            "serve": serve,
        } | in_request(adapter)
        answer = await self._post("receive_push", body, phase="bucket", bounded=False)
        return stall_of(self.url, "receive_push", answer) if serve else None

    async def checksums(self, of: str = "update") -> ChecksumReport | None:
        """POST /weights_checksums. Returns None for a status of ``NOT_SUPPORTED``."""
        try:
            answer = await self._post("weights_checksums", {"of": of}, phase="verify")
            return ChecksumReport.parse(answer)
        except _NotSupported:
            return None
        except ValueError as error:
            raise ReceiverFailed(self.url, "weights_checksums", str(error), answered=True) from None

    async def end(self) -> float:
        """POST /end_weight_update, and return the seconds in its answer."""
        answer = await self._post("end_weight_update", {"weight_version": str(self._version)}, phase="end")
        return stall_of(self.url, "end_weight_update", answer)

    async def leave(self) -> None:
        """POST /destroy_weights_update_group for every group, also after an error; the first one is raised."""
        results = await asyncio.gather(*(self._leave(name) for name in self._groups or [""]), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _leave(self, name: str) -> None:
        await self._post("destroy_weights_update_group", {"group_name": name})

    async def release(self) -> None:
        """POST /pause_generation, then /release_memory_occupation."""
        await self._post(
            "pause_generation", {"mode": "retract"}
        )  # retract: running requests go back to the queue, and are not aborted
        await self._post("release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def resume(self, what: str) -> None:
        """POST /resume_memory_occupation."""
        await self._post("resume_memory_occupation", {"tags": [what]}, phase="resume")

    def close(self) -> None:
        """Nothing to do: the session belongs to the caller."""

    async def load_snapshot(self, directory: str, version: int) -> float:
        """POST /update_weights_from_disk, and return the seconds in its answer."""
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": False}
        answer = await self._post("update_weights_from_disk", body, phase="load")
        return stall_of(self.url, "update_weights_from_disk", answer)

    async def _post(
        self, path: str, body: Mapping[str, object], *, phase: str = "", bounded: bool = True
    ) -> dict[str, object]:
        """Return the JSON map of the answer, or {}. Unless ``bounded``, wait for it without the phase's deadline."""
        deadline_s = self._deadlines.of(phase)
        body = {**body, "epoch": self._epoch, "timeout_s": deadline_s}
        answer = _json_map(await self._api.read("POST", f"/{path}", body, timeout_s=deadline_s if bounded else None))
        if answer.get("success") is False:
            raise ReceiverFailed(self.url, path, f"HTTP 200: {answer.get('message') or answer}", answered=True)
        return answer

    def _error(self, failed: CallFailed) -> Exception:
        path = failed.path.removeprefix("/")
        if failed.failure is Failure.STALE and (epoch := newer_epoch(failed.answer, self._epoch)):
            return Fenced(f"engine {self.url}: {path}", self._epoch, epoch)
        if not failed.status:
            return ReceiverFailed(self.url, path, failed.reason)
        kind = _NotSupported if failed.status in NOT_SUPPORTED else ReceiverFailed
        return kind(self.url, path, f"HTTP {failed.status}: {failed.reason}", answered=True)


class _NotSupported(ReceiverFailed):
    """The engine has no such path, or does not implement it."""


def _specs(specs: Sequence[TensorSpec]) -> dict[str, object]:
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def newer_epoch(answer: Mapping[str, object], mine: int) -> int:
    """Return the epoch of a newer learner that the engine has seen, else 0: a 409 without one does not fence."""
    epoch = answer.get("epoch")
    return epoch if isinstance(epoch, int) and epoch > mine else 0


def stall_of(url: str, phase: str, answer: Mapping[str, object]) -> float:
    """Return the seconds for which generation was paused; 0 if the answer has none. Raises ReceiverFailed."""
    stall_s = answer.get("stall_s")
    if stall_s is None:
        return 0.0
    if not isinstance(stall_s, int | float) or not math.isfinite(stall_s):
        raise ReceiverFailed(url, phase, f"stall_s: want seconds, got {stall_s!r}", answered=True)
    return float(stall_s)


def _json_map(raw: bytes) -> dict[str, object]:
    try:
        answer = json.loads(raw)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
