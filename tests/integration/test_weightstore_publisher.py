"""Pushes to receivers in processes of their own, on a real bus: exact bytes, evictions, fences, snapshots on demand."""

import asyncio
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.examples import rarely
from tests.receiver_app import START_S, Behaviour, digest, receivers, tiny_tensors, write_tiny_companions
from tests.refusals import refusal
from tests.waits import LIMIT_S, poll, until
from tidemill.bus.client.addresses import HERE
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.catch_up import Joiner, keep_up
from tidemill.weightstore.catch_up import catch_up as catch_up_to_head
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import BadManifest, CatchUpTimeout, PublisherClosed, PushFailed, ReceiverFailed
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.member import Member
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import Push
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.store.snapshot_files import ASIDE
from tidemill.weightstore.transport.port import Deadlines, Rendezvous, WeightReceiver

DEADLINE_S = 60.0
"""Seconds for a phase that succeeds."""
HUNG_S = 5.0
"""Seconds for a phase with an engine that never answers, and with no others."""
SOME_HUNG_S = 8.0
"""Seconds for a phase with engines that never answer and others that do: on a busy machine these take some, too."""
BUCKET_BYTES = 16_000
SLACK_S = 120.0
"""Seconds that a busy machine may add; a push that waits for a hung engine without a deadline takes longer."""
GOOD = Behaviour()
over_both = pytest.mark.parametrize("transport", ["broadcast", "handles"])


@contextmanager
def publishing(
    bus_url: str,
    run: str,
    directory: Path,
    *,
    epoch: int = 1,
    model_dir: Path | None = None,
    dead_after_s: float = DEADLINE_S,
    **settings: Any,
) -> Iterator[Publisher]:
    """``dead_after_s``: a push leaves out engines that have been silent so long, as a good one may be on a busy
    machine.
    """
    config = WeightsConfig(**{"bucket_bytes": BUCKET_BYTES, "phase_deadline_s": DEADLINE_S, **settings})
    publisher = Publisher(config, bus_url=bus_url, run=run, epoch=epoch, directory=directory, model_dir=model_dir)
    try:
        publisher.start()
        assert publisher.connected is not None
        publisher.connected.view.dead_after_s = dead_after_s
        yield publisher
    finally:
        publisher.close(drain=False)


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/state", timeout=60) as answer:
        return dict(json.load(answer))


def look(bus_url: str, run: str, what: str, *args: Any) -> Any:
    """Call one method of the registry."""

    async def ask() -> Any:
        async with connect(bus_url, run, BusConfig(), name="look", wait_s=60) as bus:
            return await getattr(VersionRegistry(bus), what)(*args)

    return asyncio.run(ask())


@over_both
def test_versions_reach_every_engine_bit_for_bit(bus_url: str, run_id: str, tmp_path: Path, transport: str) -> None:
    with receivers(bus_url, run_id, {"a": GOOD, "b": GOOD, "away": Behaviour(phase="draining")}) as engines:
        with publishing(bus_url, run_id, tmp_path, transport=transport) as publisher:
            assert publisher.publish_initial(tmp_path / "model").version == 0
            for step in (3, 5):
                tensors = tiny_tensors(step)
                report = publisher.publish(step, tensors.items(), wait=True).result(0)
                for tensor in tensors.values():
                    tensor.zero_()
            assert (report.version, report.step, report.engines, report.evicted) == (2, 5, ("a", "b"), {})
            assert report.stall_s == {"a": 0.001, "b": 0.001}
            ((by, rate),) = report.gb_per_s.items()
            assert by == {"broadcast": "gloo", "handles": "host_handles"}[transport]
            assert rate >= 2 * report.num_bytes / 1e9 / report.transfer_s, "to two engines, in a part of the transfer"
            assert report.num_bytes == sum(
                tensor.numel() * tensor.element_size() for tensor in tiny_tensors(5).values()
            )
            for id in ("a", "b"):
                over_group = transport == "broadcast"
                told = {
                    "version": 2,
                    "epoch": 1,
                    "digest": digest(tiny_tensors(5)),
                    "asked": 1,
                    "groups": int(over_group),
                    "ended": [1, 2],
                }
                read = 0 if over_group else 2 * len(Manifest.of(tensors.items()).buckets(BUCKET_BYTES))
                assert state(engines[id][0]) == told | {"sizes": [2] if over_group else [], "read": read}
            assert state(engines["away"][0])["version"] == 0
            head = publisher.latest()
            assert head is not None and (head.version, head.step, head.state) == (2, 5, "published")
    assert look(bus_url, run_id, "steps") == {0: 0, 1: 3, 2: 5}
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("transport", "at_once"), [("broadcast", True), *rarely([("broadcast", False)]), ("handles", False)]
)
def test_dead_and_hung_engines_are_evicted_within_the_deadline_and_named(
    bus_url: str, run_id: str, tmp_path: Path, transport: str, at_once: bool
) -> None:
    phases = ("join", "begin", "bucket", "end")
    bad = {
        f"{how}-{at}": Behaviour(fails=how, at=at, once_served=0 if at == "join" else 1, at_once=at_once)
        for how in ("kill", "stop", "refuse")
        for at in phases
    }
    with (
        receivers(bus_url, run_id, {"good-1": GOOD, "good-2": GOOD, **bad}) as engines,
        publishing(bus_url, run_id, tmp_path, transport=transport, phase_deadline_s=SOME_HUNG_S) as publisher,
    ):
        began = time.monotonic()
        first = publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        assert time.monotonic() - began < SOME_HUNG_S + SLACK_S
        assert sorted(first.evicted) == ["kill-join", "refuse-join", "stop-join"]
        assert len(first.engines) == 2 + 9

        began = time.monotonic()
        second = publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0)
        assert time.monotonic() - began < SOME_HUNG_S + SLACK_S
        assert second.engines == ("good-1", "good-2")
        for how in ("kill", "stop", "refuse"):
            for at in ("begin", "bucket", "end"):
                assert second.evicted[f"{how}-{at}"].startswith(("transfer", "bucket") if at_once else at), (
                    second.evicted
                )
        for id in second.engines:
            assert state(engines[id][0])["digest"] == digest(tiny_tensors(2))
        for at in ("begin", "bucket", "end"):  # refused, and alive: it serves the earlier version
            assert state(engines[f"refuse-{at}"][0])["digest"] == digest(tiny_tensors(1))


@over_both
def test_an_evicted_engine_comes_back_with_the_next_push(
    bus_url: str, run_id: str, tmp_path: Path, transport: str
) -> None:
    once = Behaviour(fails="refuse", at="bucket", only_once=True)
    with (
        receivers(bus_url, run_id, {"once": once}) as engines,
        publishing(bus_url, run_id, tmp_path, transport=transport) as publisher,
    ):
        first = publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        assert first.engines == () and "refused at bucket" in first.evicted["once"]
        assert "refused at bucket" in look(bus_url, run_id, "evicted")["once"]
        assert publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0).engines == ("once",)
        assert look(bus_url, run_id, "evicted") == {}
        assert state(engines["once"][0])["digest"] == digest(tiny_tensors(2))


@over_both
def test_too_few_engines_fail_the_push_and_the_number_stays_used(
    bus_url: str, run_id: str, tmp_path: Path, transport: str
) -> None:
    once = Behaviour(fails="refuse", at="end", only_once=True)
    with (
        receivers(bus_url, run_id, {"once": once}),
        publishing(bus_url, run_id, tmp_path, transport=transport, min_engines=1) as publisher,
    ):
        publisher.publish_initial(tmp_path / "model")
        with refusal(PushFailed, version=1, evicted=re.compile(r"^{'once': '(transfer|end): .*refused at end")):
            publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        head = publisher.latest()
        assert head is not None and head.version == 0
        assert publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0).version == 2
    assert look(bus_url, run_id, "row", 1).state == "failed"
    assert look(bus_url, run_id, "steps") == {0: 0, 1: 1, 2: 1}


def test_a_second_publish_waits_for_the_first_and_disturbs_nothing(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with receivers(bus_url, run_id, {"a": GOOD}) as engines, publishing(bus_url, run_id, tmp_path) as publisher:
        handles = [publisher.publish(step, tiny_tensors(step, scale=20).items(), wait=False) for step in range(1, 6)]
        assert all(handle.done for handle in handles[:-1])
        assert [handle.result(DEADLINE_S).version for handle in handles] == [1, 2, 3, 4, 5]
        assert state(engines["a"][0])["digest"] == digest(tiny_tensors(5, scale=20))


def test_a_replaced_learner_cannot_push(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with receivers(bus_url, run_id, {"a": GOOD}) as engines:
        with (
            publishing(bus_url, run_id, tmp_path / "old", epoch=1) as old,
            publishing(bus_url, run_id, tmp_path / "new", epoch=2) as new,
        ):
            with pytest.raises(Fenced):
                old.publish(1, tiny_tensors(1).items(), wait=True).result(0)
            with pytest.raises(Fenced):
                old.publish(2, tiny_tensors(1).items(), wait=True)
            assert new.publish(1, tiny_tensors(2).items(), wait=True).result(0).engines == ("a",)
            assert state(engines["a"][0])["epoch"] == 2
        with pytest.raises(Fenced), publishing(bus_url, run_id, tmp_path / "old", epoch=1):
            pass


@over_both
def test_an_engine_that_knows_a_newer_learner_ends_this_one(
    bus_url: str, run_id: str, tmp_path: Path, transport: str
) -> None:
    with (
        receivers(bus_url, run_id, {"a": GOOD}) as engines,
        publishing(bus_url, run_id, tmp_path, transport=transport) as publisher,
    ):
        body = json.dumps({"weight_version": "9", "epoch": 5}).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{engines['a'][0]}/begin_weight_update", data=body), timeout=60
        ).close()
        with refusal(Fenced, mine=1, seen=5):
            publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        assert publisher.latest() is None


async def test_a_phase_that_never_answers_is_ended_whatever_the_adapter_does() -> None:
    class Silent:
        url = "silent"
        carries = False

        async def join(self, rendezvous: Rendezvous | None) -> None:
            await asyncio.Event().wait()

        def close(self) -> None:
            pass

    row = LiveRow(role="engine", id="x", host="test", pid=1, phase="serving", address="silent")
    member = Member(row, cast(WeightReceiver, Silent()), deadlines=Deadlines(0.3))
    outcome = await Push(1, [], lambda _: None).update(PushGroup(GroupRules(1, HERE, "gloo", Deadlines(0.3)), [member]))
    assert isinstance(failed := outcome[member], ReceiverFailed)
    assert failed.phase == "join" and "0.3 s" in failed.reason


def test_wrong_tensors_are_refused_before_anything_is_pushed(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with publishing(bus_url, run_id, tmp_path) as publisher:
        assert publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0).version == 1
        wrong = tiny_tensors(2)
        del wrong["model.norm.weight"]
        for _ in range(3):  # no staging is lost
            with refusal(BadManifest, where="model.norm.weight"):
                publisher.publish(2, wrong.items(), wait=True)
        assert publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0).version == 2
    with pytest.raises(PublisherClosed):
        publisher.publish(3, tiny_tensors(3).items(), wait=True)


def test_closing_ends_a_push_that_is_repeated(bus_url: str, run_id: str, tmp_path: Path) -> None:
    failed = threading.Event()

    def gives_up() -> bool:
        failed.set()
        return False

    with publishing(bus_url, run_id, tmp_path, min_engines=1, phase_deadline_s=0.2) as publisher:
        staged = publisher.stage(1, tiny_tensors(1).items())
        handle = publisher.push(staged, gives_up)
        staged.release()
        assert failed.wait(DEADLINE_S) and not handle.done
        publisher.close()
        with pytest.raises(PushFailed):
            handle.result(0)


def test_closing_ends_a_push_or_drains_it(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with receivers(bus_url, run_id, {"hung": Behaviour(fails="stop", at="begin")}):
        with publishing(bus_url, run_id, tmp_path / "1") as publisher:
            handle = publisher.publish(1, tiny_tensors(1).items(), wait=False)
            publisher.close(drain=False)
            with pytest.raises(PublisherClosed):
                handle.result(0)
        with publishing(bus_url, run_id, tmp_path / "2", epoch=2, phase_deadline_s=HUNG_S) as publisher:
            handle = publisher.publish(1, tiny_tensors(1).items(), wait=False)
            publisher.close(drain=True)
            assert "hung" in handle.result(0).evicted
    assert not [thread for thread in threading.enumerate() if thread.name == "publisher"]


def test_a_push_waits_for_engines_it_must_have(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with publishing(bus_url, run_id, tmp_path, min_engines=1, phase_deadline_s=START_S) as publisher:
        handle = publisher.publish(1, tiny_tensors(1).items(), wait=False)
        with receivers(bus_url, run_id, {"a": GOOD}):
            assert handle.result(START_S).engines == ("a",)


class Loader:
    """The engine's side of catching up, without an engine."""

    def __init__(self, failures: int = 0) -> None:
        self.version, self.loaded = -1, ""
        self.said: list[str] = []
        self.failures = failures

    async def load(self, directory: Path, version: int, epoch: int) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("a push came between")
        self.loaded = digest(load_file(directory / "model.safetensors"))
        assert json.loads((directory / "config.json").read_text()) == {"model_type": "tiny"}
        self.version = version


async def caught_up(bus_url: str, run: str, directory: Path, loader: Any, deadline_s: float) -> Any:
    async with connect(bus_url, run, BusConfig(), name="late", wait_s=60) as bus:
        version = lambda: loader.version  # noqa: E731
        joiner = Joiner(
            engine="late", version=version, load=loader.load, directory=directory, on_wait=loader.said.append
        )
        return await catch_up_to_head(bus, joiner, deadline_s=deadline_s)


def catch_up(bus_url: str, run: str, directory: Path, loader: Any, deadline_s: float = DEADLINE_S) -> Any:
    return asyncio.run(caught_up(bus_url, run, directory, loader, deadline_s))


def test_a_late_engine_gets_a_snapshot_of_the_head_while_the_learner_waits(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    model = write_tiny_companions(tmp_path / "model")
    loader = Loader()
    begun = tmp_path / "late" / f"v0{ASIDE}"
    begun.mkdir(parents=True)
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir=model, keep_snapshots=2) as publisher:
        publisher.publish_initial(model)
        for step in range(1, 5):
            publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0)
            head = catch_up(bus_url, run_id, tmp_path / "late", loader)
            assert (loader.version, head.step, loader.loaded) == (step, step, digest(tiny_tensors(step)))
            assert not begun.exists(), "what was begun of an older version"
        assert any("a snapshot of version 1" in text for text in loader.said) and loader.said[-1] == ""
        # The oldest are removed after the newest is served.
        poll(lambda: sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["v3", "v4"])
        assert list((tmp_path / "late").iterdir()) == []
    assert look(bus_url, run_id, "row", 2).snapshot == ""
    assert look(bus_url, run_id, "head").snapshot.endswith("/v4")

    async def asked_in_vain() -> None:
        """Catch up until the learner is asked for another snapshot than the one that could not be had."""
        loader.said.clear()
        asking = asyncio.create_task(caught_up(bus_url, run_id, tmp_path / "late", loader, SLACK_S))
        in_vain = "a snapshot of version 4 from the learner (last failure: "
        await until(lambda: any(text.startswith(in_vain) for text in loader.said))
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()

    # The learner's server has ended with it; the next learner finds the snapshot on its disk, and serves it again.
    loader.version = -1
    asyncio.run(asked_in_vain())
    with pytest.raises(CatchUpTimeout):
        catch_up(bus_url, run_id, tmp_path / "late", loader, deadline_s=1)
    with publishing(bus_url, run_id, tmp_path / "snapshots", epoch=2, model_dir=model):
        catch_up(bus_url, run_id, tmp_path / "late", loader)
        assert (loader.version, loader.loaded) == (4, digest(tiny_tensors(4)))


def test_version_0_comes_over_http_where_the_model_directory_is_not(bus_url: str, run_id: str, tmp_path: Path) -> None:
    model = write_tiny_companions(tmp_path / "model")
    save_file(tiny_tensors(0), model / "model.safetensors")
    loader = Loader(failures=1)
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir=model) as publisher:
        publisher.publish_initial(tmp_path / "a path on the learner's machine")
        catch_up(bus_url, run_id, tmp_path / "late", loader)
        assert (loader.version, loader.loaded) == (0, digest(tiny_tensors(0)))


def test_nothing_published_is_nothing_to_catch_up_with(bus_url: str, run_id: str, tmp_path: Path) -> None:
    assert catch_up(bus_url, run_id, tmp_path, Loader()) is None
    with publishing(bus_url, run_id, tmp_path):  # it has fenced, and published nothing
        assert catch_up(bus_url, run_id, tmp_path, Loader()) is None


def test_an_engine_that_pushes_pass_by_notices_and_catches_up(bus_url: str, run_id: str, tmp_path: Path) -> None:
    model = write_tiny_companions(tmp_path / "model")
    loader, phases = Loader(), []

    async def follow() -> None:
        fresh = asyncio.Event()

        def stale(is_stale: bool) -> None:
            phases.append((is_stale, loader.version))
            if not is_stale:
                fresh.set()

        async with connect(bus_url, run_id, BusConfig(), name="late", wait_s=60) as bus:
            joiner = Joiner(
                engine="late", version=lambda: loader.version, load=loader.load, directory=tmp_path / "late"
            )
            following = asyncio.create_task(keep_up(bus, joiner, deadline_s=60, stale=stale, grace_s=0.2))
            async with asyncio.timeout(LIMIT_S):
                await fresh.wait()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir=model) as publisher:
        publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        asyncio.run(follow())
    assert phases == [(True, -1), (False, 1)]


def test_the_copy_that_a_snapshot_is_written_from_is_not_overwritten(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with publishing(bus_url, run_id, tmp_path) as publisher:
        publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        assert publisher.connected is not None and publisher.connected.head.copy is not None
        held = publisher.connected.head.copy.hold()  # as the writer of a snapshot does
        publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0)
        third = threading.Thread(target=lambda: publisher.publish(3, tiny_tensors(3).items(), wait=True))
        third.start()
        third.join(0.3)
        assert third.is_alive() and held.version == 1 and digest(held.tensors) == digest(tiny_tensors(1))
        held.release()
        third.join(DEADLINE_S)
        head = publisher.latest()
        assert head is not None and head.version == 3


def test_snapshots_taken_while_versions_fly_by_are_each_of_one_version(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    model = write_tiny_companions(tmp_path / "model")
    loader = Loader()
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir=model) as publisher:
        publisher.publish(1, tiny_tensors(1, scale=20).items(), wait=True).result(0)
        done = threading.Event()

        def train() -> None:
            step = 2
            while not done.is_set():
                publisher.publish(step, tiny_tensors(step, scale=20).items(), wait=True).result(0)
                step += 1

        trainer = threading.Thread(target=train)
        trainer.start()
        seen = set()
        try:
            for attempt in range(60):
                if attempt >= 4 and len(seen) > 1:
                    break
                loader.version = -1
                with suppress(CatchUpTimeout):  # the head may move on faster than the download
                    catch_up(bus_url, run_id, tmp_path / "late", loader, deadline_s=10)
                if loader.version > 0:
                    assert loader.loaded == digest(tiny_tensors(loader.version, scale=20))
                    seen.add(loader.version)
        finally:
            done.set()
            trainer.join(DEADLINE_S)
        assert len(seen) > 1
