"""Process groups of two and three: bytes, deadlines with dead and silent peers, and a peer built like SGLang's."""

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.forked import piped
from tests.refusals import refusal
from tidemill.bus.client.addresses import HERE
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.transport import broadcast
from tidemill.weightstore.transport.broadcast import BroadcastGroup, _translated
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.senders import Sender

FAR_S = 300.0
"""Seconds that no wait of a test takes on any machine, if it ends as it should."""
DEADLINE_S = 120.0
"""Seconds within which all ranks of a group join and answer."""
SMALL, LARGE = 1000, 16_000_000
"""Bytes: below and above the size of socket buffers."""


def pattern(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).mul_(31).remainder_(251).to(torch.uint8)


def receive_all(port: int, rank: int, world_size: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    group = BroadcastGroup.join("127.0.0.1", port, rank, world_size, "pair", "gloo", DEADLINE_S)
    for size in (SMALL, LARGE, SMALL):
        pipe.send(torch.equal(group.receive(size), pattern(size)))
    pipe.recv()


def hang_before_receiving(port: int, rank: int, world_size: int, pipe: Any) -> None:
    group = BroadcastGroup.join("127.0.0.1", port, rank, world_size, "pair", "gloo", DEADLINE_S)
    group.receive(SMALL)
    pipe.send(os.getpid())
    pipe.recv()


def join_in_vain(port: int, rank: int, world_size: int, deadline_s: float, pipe: Any) -> None:
    pipe.send("joining")
    try:
        BroadcastGroup.join("127.0.0.1", port, rank, world_size, "pair", "gloo", deadline_s)
    except PeerLost as error:
        pipe.send(type(error).__name__)


def receive_like_sglang(port: int, rank: int, world_size: int, pipe: Any) -> None:
    """Join a group by torch's own constructors: a rendezvous, the store under the group's name, then a group for every
    device.
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous

    timeout = timedelta(seconds=DEADLINE_S)
    store, rank, size = next(iter(rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend("gloo"), PrefixStore("pair", store), group_name="pair", timeout=timeout
    )
    flat = torch.empty(LARGE, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([flat], options).wait()
    pipe.send(torch.equal(flat, pattern(LARGE)))


def send_then_wait(pipe: Any) -> None:
    """Act as a learner that sends once and is then killed or stopped by the test."""
    group = BroadcastGroup.host("127.0.0.1", "pair", 2, "gloo", DEADLINE_S)
    pipe.send(group.port)
    group.meet()
    group.send(pattern(SMALL))
    pipe.recv()


def told(pipe: Any) -> Any:
    assert pipe.poll(DEADLINE_S), "the child says nothing"
    return pipe.recv()


def test_every_receiver_gets_the_bytes_and_no_default_group_is_made() -> None:
    group = BroadcastGroup.host("127.0.0.1", "pair", 3, "gloo", DEADLINE_S)
    with piped(receive_all, group.port, 1, 3) as (one, _), piped(receive_all, group.port, 2, 3) as (two, _):
        group.meet()
        for size in (SMALL, LARGE, SMALL):
            group.send(pattern(size))
            assert told(one) and told(two)
        group.close()
        with refusal(PeerLost, doing="sending"):
            group.send(pattern(SMALL))
    assert not dist.is_initialized()


def test_sglangs_way_of_making_the_group_meets_ours() -> None:
    group = BroadcastGroup.host("127.0.0.1", "pair", 2, "gloo", DEADLINE_S)
    with piped(receive_like_sglang, group.port, 1, 2) as (pipe, _):
        group.meet()
        group.send(pattern(LARGE))
        assert told(pipe)


def test_the_store_listens_only_at_its_address() -> None:
    group = BroadcastGroup.host("127.0.0.1", "pair", 2, "gloo", DEADLINE_S)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", group.port), timeout=1)
    group.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_receiver_ends_the_senders_wait(how: signal.Signals) -> None:
    group = BroadcastGroup.host("127.0.0.1", "pair", 2, "gloo", FAR_S)
    with piped(hang_before_receiving, group.port, 1, 2) as (pipe, process):
        group.meet()
        group.send(pattern(SMALL))
        os.kill(told(pipe), how)
        began = time.monotonic()
        with refusal(PeerLost, doing="sending 16000000 bytes"):
            group.send(pattern(LARGE), 1.0)
        assert time.monotonic() - began < FAR_S / 2, "its own second, not the time of the group"
        assert process.returncode is None or how == signal.SIGKILL


async def test_behind_a_message_that_is_lost_none_is_tried() -> None:
    """Several messages wait in a sender's thread: each would block for a deadline of its own, and the process wait for
    them at its end.
    """
    group = await asyncio.to_thread(BroadcastGroup.host, "127.0.0.1", "pair", 2, "gloo", FAR_S)
    with piped(hang_before_receiving, group.port, 1, 2) as (pipe, _):
        await asyncio.to_thread(group.meet)
        thread = ThreadPoolExecutor(1)
        pair = PushGroup(GroupRules(1, HERE, "gloo", Deadlines(5.0)))
        pair.senders = [Sender(group, thread, "127.0.0.1")]
        await asyncio.to_thread(group.send, pattern(SMALL))  # with the group's own deadline
        os.kill(told(pipe), signal.SIGSTOP)
        found = await asyncio.gather(*[pair.send(pattern(LARGE)) for _ in range(8)], return_exceptions=True)
        assert all(isinstance(error, PeerLost) for error in found) and "an earlier message was lost" in str(found[-1])
        assert sum("an earlier message was lost" in str(error) for error in found) == 7, "one has waited"
        pair.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_sender_ends_the_receivers_wait(how: signal.Signals) -> None:
    with piped(send_then_wait) as (pipe, process):
        group = BroadcastGroup.join("127.0.0.1", told(pipe), 1, 2, "pair", "gloo", FAR_S)
        assert torch.equal(group.receive(SMALL), pattern(SMALL))
        assert process.pid is not None
        os.kill(process.pid, how)
        began = time.monotonic()
        with refusal(PeerLost, doing="receiving 1000 bytes"):
            group.receive(SMALL, 1.0)
        assert time.monotonic() - began < FAR_S / 2, "its own second, not the time of the group"


def test_absent_peers_end_the_wait_with_an_error() -> None:
    began = time.monotonic()
    group = BroadcastGroup.host("127.0.0.1", "pair", 2, "gloo", 0.5)
    with refusal(PeerLost, doing="meeting 1 peers"):
        group.meet()
    port = group.port
    group.close()
    del group
    with refusal(PeerLost, group="pair", doing=f"joining at 127.0.0.1:{port}", reason=os.strerror(errno.ECONNREFUSED)):
        BroadcastGroup.join("127.0.0.1", port, 1, 2, "pair", "gloo", FAR_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with refusal(PeerLost, group="pair", doing=re.compile("^joining at "), reason=re.compile(r"\b0\.5 s$")):
            BroadcastGroup.join("127.0.0.1", silent.getsockname()[1], 1, 2, "pair", "gloo", 0.5)
    assert time.monotonic() - began < FAR_S / 2, "refused at once"


def test_closing_a_group_ends_the_wait_for_its_members_at_once() -> None:
    """One member of three never joins: neither the learner's thread nor the member that joined waits for the
    deadline.
    """
    began, deadline_s = time.monotonic(), 300.0
    group = BroadcastGroup.host("127.0.0.1", "pair", 3, "gloo", deadline_s)
    with piped(join_in_vain, group.port, 1, 3, deadline_s) as (pipe, _), ThreadPoolExecutor(1) as thread:
        meeting = thread.submit(group.meet)
        assert told(pipe) == "joining"
        with pytest.raises(TimeoutError):
            meeting.result(1.0)
        group.close()
        with refusal(PeerLost, doing="meeting 2 peers"):
            meeting.result(deadline_s)
        assert told(pipe) == "PeerLost"
    assert time.monotonic() - began < deadline_s / 2


LEFT_BEHIND = """
import threading, time
from tidemill.weightstore.transport.broadcast import within
asked = []
def abort():
    asked.append("abort")
    threading.Event().wait()
for forget in (lambda: asked.append("abort"), abort):
    try:
        within(0.2, threading.Event().wait, "stuck", forget)
    except RuntimeError as error:
        asked.append(str(error))
assert within(60, lambda: 7, "quick") == 7
print(asked, flush=True)
"""


def test_what_blocks_for_ever_is_aborted_at_the_deadline_and_keeps_no_process_from_ending() -> None:
    """NCCL blocks in its first broadcast if the peer has died; its abort may block, too."""
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["abort", "not done within 0.2 s"] * 2)


NCCL_ERROR = """NCCL error in: ProcessGroupNCCL.cpp:3690, \
invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 8000"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            NCCL_ERROR,
            (
                "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9: Duplicate GPU "
                "detected : rank 1 and rank 0"
            ),
        ),
        ("[pair.cc:534] Connection closed by peer\nmore", "Connection closed by peer"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_a_lost_peer_is_the_library_s(error: str, reason: str) -> None:
    with pytest.raises(PeerLost) as lost, _translated("pair", "sending 8 bytes"):
        raise RuntimeError(error)
    assert reason in str(lost.value) and "\n" not in str(lost.value)


def test_wrong_arguments_are_named() -> None:
    with refusal(ValueError, place="backend", got="'mpi'"):
        BroadcastGroup.host("127.0.0.1", "pair", 2, "mpi", 1)
    with refusal(ValueError, place="rank", got="2"):
        BroadcastGroup.join("127.0.0.1", 1, 2, 2, "pair", "gloo", 1)


def test_an_engine_has_no_watchdog_of_nccl_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's end, in a process of its own, keeps it; what is set already stays."""
    seen: dict[int, list[str | None]] = {}

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen[rank] = [os.environ.get(name) for name in broadcast.QUIET_WATCHDOG]

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    for name in broadcast.QUIET_WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    group = object.__new__(BroadcastGroup)
    group.world_size, group.timeout_s, group.name = 2, 5.0, "g"
    for group.rank in (0, 1):
        group._nccl(cast(dist.Store, None))
    assert seen == {0: [None, None], 1: ["0", "0"]}
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    group._nccl(cast(dist.Store, None))
    assert seen[1] == ["1", "0"]
