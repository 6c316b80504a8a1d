"""The versions of a run: one row each, and the head, in the bucket ``weights``.

    v.<n>     the row of a version, ``pushing`` before any engine has it, so that a reader of its tokens finds the step
    head      the newest published version, moved by compare-and-set; its ``fence`` is the newest learner's epoch
    snapshot  the row of the newest version that has a snapshot
    evicted   the live engines that were left out of the last push, and why: {"engines": {id: reason}}
    want      the oldest version whose snapshot an engine needs (``tidemill.weightstore.catch_up``)

A number is reserved by creating its row, so it is never used twice, even if the push fails or the learner dies. Rows
that were lost (the bucket was emptied) are restored from the other records that name them: a publisher's memory, the
log PLAN, the tasks. A head that cannot be read counts as lost: the newest learner restores it. ``after`` of the row is
the end of SAMPLES before any engine could have the version: no sample up to there can be of it.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import Fenced, NotFound, RowConflict, WireError
from tidemill.bus.streams.bus import Bus, current_epoch
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import VersionRow, row_of
from tidemill.bus.wire.subjects import Position, natural

_log = logging.getLogger(__name__)

HEAD, SNAPSHOT, WANT, EVICTED = "head", "snapshot", "want", "evicted"
# Numbers skipped after the highest known one when rows were lost: an engine may have versions without any record
UNUSED_AFTER_LOSS = 1000


class VersionRegistry:
    """The versions of one run. Every method raises BusUnavailable when the bus stays away."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self.rows, self._samples = bus, bus.rows("weights"), bus.samples
        self._steps: dict[int, int] = {}
        self._next, self._repeated = 0, FailureLog(_log)

    async def head(self) -> VersionRow | None:
        """Return the newest published version; None before the first. Raises UnreadableRow until it is restored."""
        entry = await self.rows.get(HEAD)
        return _parse(HEAD, entry and entry[0])

    async def repaired_head(self, epoch: int) -> VersionRow | None:
        """Return the head for the learner of this epoch, which restores an unreadable one, or raises Fenced."""
        return _parse(HEAD, await self._readable_head(epoch))

    async def _readable_head(self, epoch: int) -> Value | None:
        value, revision = await self.rows.read(HEAD)
        if value is not None or not revision:
            return value
        newest = await self._newest_published()
        restored: Value = {**({} if newest is None else newest.stored()), "fence": epoch}
        value = await self._change_head(epoch, lambda head: restored if head is None else None)
        version = "none" if newest is None else newest.version
        self._repeated(
            "head of the registry could not be read and was restored", f"revision={revision} version={version}"
        )
        return value

    async def row(self, version: int) -> VersionRow | None:
        """Return the row of a version; None if it is not registered, or the row cannot be read."""
        value, _ = await self.rows.read(_key(version))
        return _parse(_key(version), value)

    async def row_for(self, version: int, seq: int) -> VersionRow | None:
        """Return the row of a version that the sample at ``seq`` names; None = there is none.

        Without ``after`` nothing has been pushed, and this sets it to ``seq``: every later call returns the same.
        """
        row = await self.row(version)
        # Its learner is between creating the row and setting ``after``, or died there.
        if row is not None and row.after < 0 and row.state == "pushing":
            ends = await self._samples.ends()
            return await self._begin_after(row, ends if len(ends) > 1 else (seq,))
        return row

    async def steps(self) -> dict[int, int]:
        """Return the step of every version that an engine may have; each row is read once by this object."""
        for version in await self._versions():
            if version not in self._steps:
                await self.step_of(version)
        return dict(self._steps)

    async def step_of(self, version: int) -> int:
        """Return the step of one version. Raises NotFound."""
        if version not in self._steps:
            row = await self.row(version)
            if row is None:
                raise NotFound("weights", f"version {version}")
            self._steps[version] = row.step
        return self._steps[version]

    async def fence(self, epoch: int) -> VersionRow | None:
        """Fence learners of lower epochs. Returns the head, whose row is published: its learner may have died before.

        Raises Fenced when this learner is fenced itself.
        """

        def fenced(head: Value | None) -> Value:
            _check_fence(head, epoch)
            return {**(head or {}), "fence": epoch}

        await self._readable_head(epoch)
        head = _parse(HEAD, await self._change_head(epoch, fenced))
        if head is not None:
            await self._change(_key(head.version), head.version, state=head.state)
        await self._count()
        return head

    async def lost(self, steps: Mapping[int, int]) -> bool:
        """Return whether the head or a row is missing, although the versions of ``steps`` were used."""
        if not steps:
            return False
        head, _ = await self.rows.read(HEAD)
        return _parse(HEAD, head) is None or not steps.keys() <= set(await self._versions())

    async def restore(self, steps: Mapping[int, int], epoch: int) -> None:
        """Restore missing and unreadable rows of versions (``steps``: -> step), and an older head. Raises Fenced."""
        present = await self._versions()
        missing = steps.keys() - set(present)
        restored = [
            version for version, step in steps.items() if await self._restore_row(version, step, epoch, "published")
        ]
        if missing:
            # New versions are numbered after the highest row, so this row alone skips the numbers in between.
            await self._restore_row(max((*present, *steps)) + UNUSED_AFTER_LOSS, steps[max(steps)], epoch, "failed")
        newest = await self._newest_published()
        if newest is not None:
            await self._raise_head(newest, epoch)
        head, last = "none" if newest is None else newest.version, max(await self._versions())
        text = f"head={head} restored={len(restored)}, new versions are numbered after {last}"
        lost = "the registry of versions has lost rows (bucket weights emptied, or bytes that cannot be read?)"
        self._repeated(lost, text, level=logging.ERROR)

    async def _restore_row(self, version: int, step: int, epoch: int, state: str) -> bool:
        row = VersionRow(version=version, step=step, epoch=epoch, state=state).stored()
        changed = await self.rows.change(
            _key(version), lambda value: row if value is None else None, replace_unreadable=True
        )
        return changed.before is None

    async def _raise_head(self, newest: VersionRow, epoch: int) -> None:
        def raised(value: Value | None) -> Value | None:
            _check_fence(value, epoch)
            head = _parse(HEAD, value)
            if head is not None and head.version >= newest.version:
                return None
            return {**newest.stored(), "fence": epoch}

        await self._change_head(epoch, raised)

    async def _change_head(self, epoch: int, fn: Callable[[Value | None], Value | None]) -> Value | None:
        """Change the head and return it; ``fn`` gets None for one that is missing or cannot be read.

        Such a head has lost its fence, and an older learner must not write it: the row of the epoch shows that it is
        replaced. Every learner raises that row first and fences the head afterwards, so one that raises it later than
        this reads it changes the head later, too. Raises Fenced.
        """

        async def refuse_if_replaced() -> None:
            newest = await current_epoch(self._bus)
            if newest > epoch:
                raise Fenced(f"weights.{HEAD}", epoch, newest)

        return (await self.rows.change(HEAD, fn, replace_unreadable=True, if_none=refuse_if_replaced)).after

    async def _newest_published(self) -> VersionRow | None:
        for version in sorted(await self._versions(), reverse=True):
            row = await self.row(version)
            if row is not None and row.state == "published":
                return row
        return None

    async def _count(self) -> None:
        self._next = max(self._next, max(await self._versions(), default=0) + 1)

    async def newest_epoch(self) -> int:
        """Return the epoch of the newest learner (``fence``); 0 = none. Raises UnreadableRow, as ``head``."""
        entry = await self.rows.get(HEAD)
        return 0 if entry is None else int(entry[0].get("fence", 0))

    async def publish_initial(self, where: str, epoch: int, *, digest: str = "") -> VersionRow:
        """Publish version 0, loaded from the model directory, unless there is a head. Returns the head."""
        head = await self.repaired_head(epoch)
        if head is not None:
            return head
        row = VersionRow(version=0, step=0, epoch=epoch, digest=digest, snapshot=where, after=0)
        await self.rows.put(_key(0), row.stored())
        row = await self.publish(row)
        await self._note_snapshot(row)
        return row

    async def reserve(self, step: int, epoch: int, *, digest: str = "") -> VersionRow:
        """Create the row of a new version, ``pushing``, with an unused number and ``after``. Raises Fenced."""
        _check_fence(await self._readable_head(epoch), epoch)
        if not self._next:
            await self._count()
        while True:
            row = VersionRow(version=self._next, step=step, epoch=epoch, digest=digest)
            self._next += 1
            try:
                # Nor in place of a deleted one: its number was used.
                await self.rows.update(_key(row.version), row.stored(), 0)
                return await self._begin_after(row, await self._samples.ends())
            except RowConflict:  # used by a learner that has been replaced, or that replaces this one
                continue

    async def publish(self, row: VersionRow) -> VersionRow:
        """Make the version the head. Returns its row. Raises Fenced for a newer learner's epoch or version."""
        row = dataclasses.replace(row, state="published")

        def published(value: Value | None) -> Value | None:
            """Return the version as the head; None if it is the head already."""
            _check_fence(value, row.epoch)
            head = _parse(HEAD, value)
            if head is None or head.version < row.version:
                return {**row.stored(), "fence": row.epoch}
            if (head.version, head.epoch) == (row.version, row.epoch):  # a repeated call
                return None
            raise Fenced(
                f"weights.{HEAD}: version {row.version} is behind version {head.version}", row.epoch, head.epoch
            )

        await self._change_head(row.epoch, published)
        now = row.stored()

        def shown(value: Value | None) -> Value | None:
            if value is None or value.get("version") != row.version:
                return now
            return None if value.get("state") == row.state else {**value, "state": row.state}

        await self.rows.change(_key(row.version), shown, replace_unreadable=True)
        # A head that could not be read was restored meanwhile, from the rows that were published before this one.
        await self._change_head(row.epoch, published)
        return row

    async def fail(self, row: VersionRow) -> None:
        """Record that the push failed. The number stays used: an engine may have the version.

        A version that became the head stays published, also where ``publish`` did not return: the answer of the bus was
        lost, or came after a newer learner's fence.
        """
        value, _ = await self.rows.read(HEAD)
        head = _parse(HEAD, value)
        is_head = head is not None and (head.version, head.epoch) == (row.version, row.epoch)
        state = "published" if is_head else "failed"

        def ended(value: Value | None) -> Value | None:
            return {**value, "state": state} if value is not None and value.get("state") == "pushing" else None

        await self.rows.change(_key(row.version), ended, replace_unreadable=True)

    async def set_snapshot(self, version: int, where: str) -> None:
        """Record where a version's snapshot is ("" = it is gone). Raises NotFound for a version that does not exist."""
        await self._change(_key(version), version, snapshot=where)
        await self._change(HEAD, version, snapshot=where)  # only while it is the head
        row = await self.row(version) or await self._forgotten(version, where)
        if row is not None:
            await self._note_snapshot(row)

    async def _forgotten(self, version: int, where: str) -> VersionRow | None:
        """Return the row of a version that has none of its own any more (``forget``), while it has the newest snapshot.

        None: an older one, whose snapshot is removed. Raises NotFound for another version.
        """
        value, _ = await self.rows.read(SNAPSHOT)
        newest = _parse(SNAPSHOT, value)
        if newest is not None and newest.version == version:
            return dataclasses.replace(newest, snapshot=where)
        if where:
            raise NotFound("weights", f"version {version}")
        return None

    async def snapshot(self) -> VersionRow | None:
        """Return the row of the newest version that has a snapshot."""
        value, _ = await self.rows.read(SNAPSHOT)
        row = _parse(SNAPSHOT, value)
        return row if row is not None and row.snapshot else None

    async def request_snapshot(self, version: int, by: str, nonce: str) -> None:
        """Request a snapshot of a version or a later one. All engines need the head, so one row serves all."""
        await self.rows.put(WANT, {"version": version, "by": by, "nonce": nonce})

    async def _begin_after(self, row: VersionRow, ends: Position) -> VersionRow:
        """Return the row with ``after``, which is set once."""
        after: Value = {"after": min(ends), **({"afters": ends} if len(ends) > 1 else {})}

        def begun(value: Value | None) -> Value | None:
            return None if value is None or int(value.get("after", -1)) >= 0 else {**value, **after}

        value = (await self.rows.change(_key(row.version), begun, replace_unreadable=True)).after or after
        return dataclasses.replace(row, after=int(value["after"]), afters=tuple(value.get("afters", ())))

    async def set_evicted(self, reasons: Mapping[str, str]) -> None:
        """Record the engines that are not pushed to, with the reasons, for `tidemill status`."""
        await self.rows.put(EVICTED, {"engines": dict(reasons)})

    async def evicted(self) -> dict[str, str]:
        """Return the engines that are not pushed to -> why, as of the last push."""
        entry = await self.rows.get(EVICTED)
        return {} if entry is None else {str(engine): str(why) for engine, why in entry[0].get("engines", {}).items()}

    async def _note_snapshot(self, row: VersionRow) -> None:
        """Keep the row ``snapshot`` at the newest version with one, which may also lose it."""

        def noted(value: Value | None) -> Value | None:
            before = -1 if value is None else int(value["version"])
            if row.version < before or (row.version > before and not row.snapshot):
                return None
            return row.stored()

        await self.rows.change(SNAPSHOT, noted, replace_unreadable=True)

    async def forget(self, before_step: int) -> None:
        """Remove the rows of versions of earlier steps, up to the first one of this step or later."""
        async with aclosing(self.rows.written("v.*", 1)) as rows:  # type: ignore[type-var]
            async for value, message in rows:
                if int(value["step"]) >= before_step:
                    await self.rows.trim("v.*", message.seq)
                    return

    async def _versions(self) -> list[int]:
        named = [natural(key.removeprefix("v.")) for key in await self.rows.keys() if key.startswith("v.")]
        return [version for version in named if version is not None]

    async def _change(self, key: str, version: int, **changes: str | int) -> None:
        def changed(value: Value | None) -> Value | None:
            if value is None or value.get("version") != version or value.items() >= changes.items():
                return None
            return {**value, **changes}

        await self.rows.change(key, changed, replace_unreadable=True)


def _key(version: int) -> str:
    return f"v.{version}"


def _check_fence(head: Value | None, epoch: int) -> None:
    fence = 0 if head is None else int(head.get("fence", 0))
    if fence > epoch:
        raise Fenced(f"weights.{HEAD}", epoch, fence)


def _parse(key: str, value: JsonObject | None) -> VersionRow | None:
    """Return the row; None for none, and for a head that has only a fence."""
    if value is None or "version" not in value:
        return None
    try:
        return row_of(VersionRow, value)
    except WireError as error:
        raise WireError(f"weights.{key}.{error.field}", error.want, error.got) from None
