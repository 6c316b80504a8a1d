"""A single-request push: received in order, served with it or not, and every way in which it can break off."""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_engine_updates import directories, family, models
from tests.engine_push import flat, joined, named, serves
from tests.engine_serving import Served, serving
from tests.waits import LIMIT_S
from tidemill.actors.serving.builtin.receiving import bucket_of
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.format.manifest import spec_of

__all__ = ["directories", "family", "models"]


async def test_a_push_asked_for_at_once(directories: list[Path], models: list[Any]) -> None:
    """Buckets are copied at first, later received in place; they are served with the last message, or at the end
    request.
    """
    async with serving(directories[0]) as served, joined(served) as push:
        for version in range(1, 6):
            model, serve = models[version % 3], version % 2 == 1
            status, answer = await push.at_once(model, version, serve=serve)
            assert (status, answer["success"], answer["stall_s"] is None) == (200, True, not serve), answer
            if not serve:
                assert served.engine.version == version - 1
                assert (await served.post("/weights_checksums", {"of": "update"}))[1]["weight_version"] == str(version)
                assert (await push.end(version))[0] == 200
            assert served.engine.version == version and serves(served, model)


@pytest.mark.parametrize("serve", [True, False])
async def test_what_is_wrong_in_a_push_asked_for_at_once_is_said_and_nothing_of_it_is_served(
    directories: list[Path], models: list[Any], serve: bool
) -> None:
    async with serving(directories[0]) as served, joined(served) as push:
        tensors = list(named(models[1]))
        for parts, wanted in (
            ([tensors[:5], tensors[4:]], "received twice"),
            ([tensors[:5], [("model.strange", tensors[0][1])]], "the model has no tensor of this name"),
            ([tensors[:5], [(tensors[5][0], tensors[5][1][:1])]], "want shape"),
        ):
            status, answer = await push.ask_at_once(parts, 1, serve=serve)
            assert (status, wanted in answer["message"]) == (400, True), answer
        asked = asyncio.create_task(push.ask_at_once([tensors[:5]], 1, serve=serve))
        await asyncio.to_thread(push.group.send, flat(tensors[:5]), LIMIT_S)
        status, answer = await asked
        assert status == (400 if serve else 200), answer
        if not serve:
            status, answer = await push.end(1)
        assert (status, "tensors are missing" in answer["message"]) == (400, True), answer
        assert served.engine.version == 0 and serves(served, models[0])
        assert (await push.end(1))[0] == 400, "it was discarded"
        await push.at_once(models[1], 1, serve=True)
        assert serves(served, models[1])


async def test_a_push_asked_for_at_once_is_discarded_when_its_sender_is_silent_or_another_begins(
    directories: list[Path], models: list[Any]
) -> None:
    tensors = list(named(models[1]))
    parts = [tensors[:5], tensors[5:9], tensors[9:]]
    async with serving(directories[0]) as served:
        async with joined(served) as push:
            push.fields["timeout_s"] = 1.0
            asked = asyncio.create_task(push.ask_at_once(parts, 1))
            with suppress(PeerLost):  # if the message is later than the time-out
                await asyncio.to_thread(push.group.send, flat(parts[0]), LIMIT_S)
            status, answer = await asked
            assert (status, "receiving" in answer["message"]) == (400, True), answer
        async with joined(served) as old:
            asked = asyncio.create_task(old.ask_at_once(parts, 1))
            await asyncio.to_thread(old.group.send, flat(parts[0]), LIMIT_S)
            async with joined(served) as new:
                await new.at_once(models[2], 2, serve=True)
                with suppress(PeerLost):  # the engine may have left before it waited for this message
                    await asyncio.to_thread(old.group.send, flat(parts[1]), LIMIT_S)
                assert (await asked)[0] == 400
                assert served.engine.version == 2 and serves(served, models[2])
                await new.at_once(models[1], 3, serve=True)
                assert serves(served, models[1])


async def test_of_two_pushes_that_begin_at_once_the_later_one_is_received(
    directories: list[Path], models: list[Any]
) -> None:
    tensors = list(named(models[2]))
    async with serving(directories[0]) as served, joined(served) as push:
        async with served.engine.updates.writing:
            asked = [asyncio.create_task(push.ask_at_once([tensors], 1))]
            await served.until(lambda: served.engine.updates.open_update is not None)
            asked.append(asyncio.create_task(push.ask_at_once([tensors], 2)))
            await served.until(lambda: served.engine.updates.open_update.version == 2)
        status, answer = await asked[0]
        assert (status, "another one has begun" in answer["message"]) == (400, True), answer
        await asyncio.to_thread(push.group.send, flat(tensors), LIMIT_S)
        assert (await asked[1])[0] == 200 and served.engine.version == 2 and serves(served, models[2])


async def test_messages_of_discarded_pushes_keep_no_memory(directories: list[Path], models: list[Any]) -> None:
    """They return the group's two message buffers; otherwise the third push would wait without end."""
    tensors = list(named(models[1]))
    parts = [tensors[:5], tensors[5:9], tensors[9:]]
    async with serving(directories[0]) as served, joined(served) as push:
        for version in range(1, 4):
            asked = asyncio.create_task(push.ask_at_once(parts, version))
            await served.until(lambda: any(each.receiving == 2 for each in served.engine.updates.groups.values()))
            await push.begin(version)
            for part in parts[:2]:
                await asyncio.to_thread(push.group.send, flat(part), LIMIT_S)
            assert (await asked)[0] == 400
        async with asyncio.timeout(LIMIT_S):
            await push.at_once(models[2], 4, serve=True)
        assert serves(served, models[2])


async def test_buffers_of_a_group_are_freed_when_messages_are_received_in_place(
    directories: list[Path], models: list[Any]
) -> None:
    """A bucket of one tensor is always received in place, unless the runner has no place for any."""
    async with serving(directories[0]) as served, joined(served) as push:
        await push.at_once(models[1], 1, serve=True)
        (group,) = served.engine.updates.groups.values()
        assert any(map(len, group._memory))
        await push.at_once(models[2], 2, serve=True, one_by_one=True)
        assert serves(served, models[2])
        one = bucket_of([spec_of(*next(iter(named(models[2]))))])
        assert any(map(len, group._memory)) == (served.engine.updates.weights.place(one) is None)


async def test_messages_that_come_at_the_same_moment_are_all_there(directories: list[Path], models: list[Any]) -> None:
    """The event loop gets both in one iteration: when it handles the first, the second is there, before its callback
    has run.
    """
    async with serving(directories[0]) as served, joined(served) as push:
        await push.at_once(models[1], 1, serve=True)  # from then on most buckets are received in place
        tensors = list(named(models[2]))
        parts = [tensors[:5], tensors[5:]]
        asked = asyncio.create_task(push.ask_at_once(parts, 2))
        await served.until(lambda: any(each.receiving == 2 for each in served.engine.updates.groups.values()))
        for part in parts:
            push.group.send(flat(part), LIMIT_S)
        time.sleep(0.3)  # noqa: ASYNC251 - nothing else may have its turn meanwhile
        status, answer = await asked
        assert (status, answer["success"]) == (200, True), answer
        assert serves(served, models[2])


async def test_a_group_that_is_left_while_a_message_is_copied(
    directories: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted push is refused, and nothing more is received for it."""
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served) as old:
        copying = copies_late(served, monkeypatch)
        asked = asyncio.create_task(old.ask_at_once([tensors[:5], tensors[5:9], tensors[9:]], 1))
        await asyncio.to_thread(old.group.send, flat(tensors[:5]), LIMIT_S)
        await asyncio.to_thread(copying.begun.wait, LIMIT_S)
        async with joined(served) as new:
            copying.go_on.set()
            status, answer = await asked
            assert (status, "another one has begun" in answer["message"]) == (400, True), answer
            await new.at_once(models[2], 2, serve=True)
            assert serves(served, models[2])


async def test_a_push_that_begins_while_the_last_message_of_another_is_copied_is_not_ended_by_it(
    directories: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served) as push:
        copying = copies_late(served, monkeypatch)
        asked = asyncio.create_task(push.ask_at_once([tensors], 1))
        await asyncio.to_thread(push.group.send, flat(tensors), LIMIT_S)
        await asyncio.to_thread(copying.begun.wait, LIMIT_S)
        beginning = asyncio.create_task(push.begin(2))
        await served.until(lambda: served.engine.updates.open_update.version == 2)
        copying.go_on.set()
        assert (await beginning)[0] == 200
        status, answer = await asked
        assert (status, "another one has begun" in answer["message"]) == (400, True), answer
        assert (await push.bucket(named(models[2])))[0] == 200
        assert (await push.end(2))[0] == 200
        assert served.engine.version == 2 and serves(served, models[2])


async def test_a_push_whose_last_message_is_copied_when_another_epoch_takes_over_is_not_served(
    directories: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served, epoch=1) as push:
        copying = copies_late(served, monkeypatch)
        asked = asyncio.create_task(push.ask_at_once([tensors], 1))
        await asyncio.to_thread(push.group.send, flat(tensors), LIMIT_S)
        await asyncio.to_thread(copying.begun.wait, LIMIT_S)
        served.engine.updates.require_current_epoch(2, "of the next learner")
        copying.go_on.set()
        status, answer = await asked
        assert (status, "epoch 2" in answer["message"]) == (400, True), answer
        assert served.engine.version == 0 and serves(served, models[0])


@dataclass(frozen=True)
class Copying:
    """The first copy of a message: ``begun`` is set by the engine, which then waits for ``go_on``."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


def copies_late(served: Served, monkeypatch: pytest.MonkeyPatch) -> Copying:
    """Let the first copy of a message wait until it may go on."""
    standby, copying = served.engine.updates._standby, Copying()
    copy = standby._copy

    def late(*args: Any) -> Any:
        if not copying.begun.is_set():
            copying.begun.set()
            assert copying.go_on.wait(LIMIT_S)
        return copy(*args)

    monkeypatch.setattr(standby, "_copy", late)
    return copying
