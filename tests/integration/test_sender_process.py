"""The learner's end of a process group in a process of its own, over gloo: bytes, lost receivers, and the loss of the
process itself.

NCCL runs in the same process on GPUs (tests/gpu/test_gpu_nccl_group.py); here it is gloo that is killed.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest
import torch

from tests.forked import piped
from tests.integration.test_weightstore_broadcast import LARGE, SMALL, hang_before_receiving, pattern, receive_all, told
from tests.integration.test_weightstore_publisher import GOOD, state
from tests.receiver_app import Behaviour, digest, receivers, staged, tiny_tensors
from tests.refusals import refusal
from tests.waits import LIMIT_S, turn
from tidemill.bus.client.addresses import HERE
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.errors import PeerLost, ReceiverFailed
from tidemill.weightstore.push.member import Member, Updated
from tidemill.weightstore.push.push import Outcome, Push
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.transport import senders
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import HostMemory
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.senders import SenderProcess

FAR_S = 300.0
"""Seconds that no wait of a test takes on any machine, if it ends as it should."""


@contextmanager
def hosted(world_size: int, memory: HostMemory, timeout_s: float = LIMIT_S) -> Iterator[SenderProcess]:
    sender = SenderProcess.host("127.0.0.1", "pair", world_size, "gloo", timeout_s, memory=memory)
    try:
        yield sender
    finally:
        sender.close()
        memory.close()


def ended(pid: int) -> bool:
    """Wait until a process has ended, or been reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()  # select.select takes descriptors up to 1023 only
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(LIMIT_S * 1000))
    finally:
        os.close(pidfd)


def test_nccl_has_a_process_of_its_own_and_gloo_has_none() -> None:
    group = senders.host("127.0.0.1", "pair", 2, "gloo", 20)
    assert isinstance(group, BroadcastGroup) and senders.APART == ("nccl",)
    group.close()


def test_every_receiver_gets_the_bytes_of_the_staging_memory() -> None:
    memory = HostMemory()
    block = memory.empty(LARGE + SMALL)
    small, large = block[LARGE:], block[:LARGE]
    with (
        hosted(3, memory) as sender,
        piped(receive_all, sender.port, 1, 3) as (one, _),
        piped(receive_all, sender.port, 2, 3) as (two, _),
    ):
        sender.meet()
        for flat, following in ((small, large), (large, small), (small, None)):
            flat.copy_(pattern(flat.numel()))  # filled after the process has mapped it
            sender.send(flat, following=following)
            assert told(one) and told(two)
        sender.close()
        with refusal(PeerLost, group="pair", doing="sending 1000 bytes"):
            sender.send(small)
    assert ended(sender.pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_lost_in_a_broadcast_ends_the_call(how: signal.Signals) -> None:
    memory = HostMemory()
    flat = memory.empty(LARGE)
    with hosted(2, memory, timeout_s=FAR_S) as sender, piped(hang_before_receiving, sender.port, 1, 2) as (pipe, _):
        sender.meet()
        flat[:SMALL].copy_(pattern(SMALL))
        sender.send(flat[:SMALL])
        os.kill(told(pipe), how)
        began = time.monotonic()
        with refusal(PeerLost, doing="sending 16000000 bytes"):
            sender.send(flat, 1.0)
        assert time.monotonic() - began < FAR_S / 2, "its own second, not the time of the group"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (signal.SIGSTOP, "has no answer after 1 s, and is killed"),
        (signal.SIGKILL, "has ended: signal 9"),
        pytest.param(signal.SIGABRT, "signal 6", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_hangs_or_ends_costs_the_group_and_no_more(
    how: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's watchdog ends its process by SIGABRT; a call that cannot be interrupted looks as a stopped process
    does.
    """
    monkeypatch.setattr(senders, "GRACE_S", 1.0 if how == signal.SIGSTOP else LIMIT_S)
    memory = HostMemory()
    flat = memory.empty(SMALL)
    with hosted(2, memory, timeout_s=LIMIT_S) as sender, piped(receive_all, sender.port, 1, 2):
        sender.meet()
        os.kill(sender.pid, how)
        with pytest.raises(PeerLost, match=reason):
            sender.send(flat, 1.0 if how == signal.SIGSTOP else LIMIT_S)
        assert ended(sender.pid)


def test_closing_ends_a_call_under_way() -> None:
    memory = HostMemory()

    async def close_meanwhile(sender: SenderProcess) -> None:
        meeting = asyncio.create_task(asyncio.to_thread(sender.meet))  # no peer comes
        await turn()
        sender.close()
        with refusal(PeerLost, group="pair", doing="meeting 1 peers"):
            await meeting

    began = time.monotonic()
    with hosted(2, memory, timeout_s=300.0) as sender:
        asyncio.run(close_meanwhile(sender))
    assert time.monotonic() - began < 150


PARENT = """
import threading
from tidemill.weightstore.transport.handles import HostMemory
from tidemill.weightstore.transport.senders import SenderProcess
sender = SenderProcess.host("127.0.0.1", "pair", 2, "gloo", 300.0, memory=HostMemory())
print(sender.pid, flush=True)
sender.meet()
"""


def test_the_process_ends_with_the_learner_also_in_the_middle_of_a_call() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        pid = int(learner.stdout.readline())
        learner.kill()
    assert ended(pid)


async def pushed(group: PushGroup, version: int, memory: HostMemory) -> Outcome:
    staging = staged(tiny_tensors(version), memory)
    return await asyncio.wait_for(Push(version, staging.buckets, lambda _: None).update(group), LIMIT_S)


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["at once", "in turn"])
async def test_an_engine_killed_in_a_broadcast_costs_a_process_and_the_next_push_works(
    bus_url: str, run_id: str, at_once: bool
) -> None:
    deadlines, memory = Deadlines(60.0), HostMemory()
    rules = GroupRules(3, HERE, "gloo", deadlines, memory=memory, apart=("gloo",))
    lost = Behaviour(fails="kill", at="bucket", once_served=1, at_once=at_once)
    good = Behaviour(at_once=at_once) if not at_once else GOOD
    with receivers(bus_url, run_id, {"a": good, "b": lost, "c": good}) as engines:
        async with aiohttp.ClientSession() as session:
            members = {}
            for id, (url, process) in engines.items():
                assert process.pid is not None
                stated = Capabilities(single_request_push=at_once)
                row = LiveRow(
                    role="engine",
                    id=id,
                    host="test",
                    pid=process.pid,
                    phase="serving",
                    address=url,
                    capabilities=stated,
                )
                members[id] = Member(row, HttpReceiver(session, url, epoch=1, deadlines=deadlines), deadlines=deadlines)
            group = PushGroup(rules, members.values())
            try:
                assert all(isinstance(how, Updated) for how in (await pushed(group, 1, memory)).values())
                outcome = await pushed(group, 2, memory)
                assert isinstance(outcome[members["b"]], ReceiverFailed)
                group.members.remove(members["b"])
                assert all(isinstance(how, Updated) for how in (await pushed(group, 3, memory)).values())
                for id in "ac":
                    assert isinstance(outcome[members[id]], Updated)
                    told = await asyncio.to_thread(state, engines[id][0])
                    assert (told["digest"], told["ended"]) == (digest(tiny_tensors(3)), [1, 2, 3])
            finally:
                group.close()
                memory.close()


def test_what_is_not_in_the_shared_memory_is_our_mistake() -> None:
    memory = HostMemory()
    with hosted(2, memory) as sender, pytest.raises(AssertionError, match="no memory of this kind"):
        sender.send(torch.zeros(8, dtype=torch.uint8))
