"""Child processes of rollouts: results, faults, and everything that a program can do to its process."""

# ruff: noqa: ASYNC220 - other processes are waited for

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tests.waits import LIMIT_S, until, until_gone
from tidemill.actors.episodes import children as episode_children
from tidemill.actors.episodes.children import LOADS, Children
from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.wire.json_object import JsonMapping

SCRIPT = "tests.rollout_programs:Script"
NO_OPTIONS: JsonMapping = {}


def children(
    use: str = SCRIPT,
    *,
    options: JsonMapping = NO_OPTIONS,
    resumes: bool = False,
    kill_after_s: float = 0.3,
    **settings: Any,
) -> Children:
    settings = {"memory_mb": 0, "again": "resume" if resumes else "restart", **settings}
    config = RolloutConfig(use=f"agent:{use}", options=dict(options), **settings)
    return Children(config, kill_after_s=kill_after_s)


async def run(pool: Children, do: str, *, id: str = "1.0.a", **metadata: Any) -> EpisodeResult:
    task = {"prompt": "p", "label": "l", "metadata": {"do": do, **metadata}}
    return await pool.run(id, base_url="http://127.0.0.1:9/e/k/v1", api_key="k", task=task)


async def failure_of(pool: Children, do: str, **metadata: Any) -> str:
    with pytest.raises(ProgramFailed) as found:
        await run(pool, do, **metadata)
    assert found.value.ended == ("process" in found.value.reason)
    return found.value.reason


async def test_an_episode_goes_on_behind_its_state_in_a_class_that_can() -> None:
    async with children("tests.rollout_programs:Resumes", resumes=True) as pool:
        assert (await run(pool, "")).value == {"run": 1.0, "saves": 1.0}
        task = {"prompt": "p", "state": {"turn": 3}}
        assert (await pool.run("2.0.a", base_url="http://127.0.0.1:9/v1", api_key="k", task=task)).value == {
            "resumed": 3.0
        }
    for use in ("Agent", "plain"):
        async with children(f"tests.rollout_programs:{use}", resumes=True) as pool:
            with refusal(ProgramFailed, reason=re.compile(r"TypeError: .*\bagain: resume\b"), ended=False):
                await pool.load()


async def begun(file: Path) -> None:
    await until(file.exists, every_s=0.005)


async def ended(pid: int) -> None:
    """Wait until a process is no more, or a corpse that its parent has not buried."""

    def runs() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    await until_gone(runs)


async def test_results() -> None:
    async with children(options={"a": 1}) as pool:
        for text, want in (("1.5", 1.5), ("True", 1.0), ("None", None), ("{'a': 1, 'b': -2.5}", {"a": 1.0, "b": -2.5})):
            assert await run(pool, "give", value=text) == EpisodeResult(value=want)
        assert (await run(pool, "told")).value == 1.0
        assert (await run(pool, "fault", value=-0.5)) == EpisodeResult(fault=-0.5)
        assert (await run(pool, "prints")).value == 1.0
        assert (await run(pool, "give", value="__import__('numpy').float32(0.5)")).value == 0.5


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("float('nan')", "finite"),
        ("1e400", "finite"),
        ("1e7", "+-1e+06"),
        ("[1]", "got list"),
        ("{'a': 'b'}", "result['a']"),
        ("{1: 2}", "texts"),
        ("'1'", "got str"),
        ("10**400", "OverflowError"),
        ("{str(i): 1 for i in range(200000)}", "at most"),
        ("object()", "got object"),
    ],
)
async def test_what_is_no_reward_is_refused_with_a_reason(value: str, reason: str) -> None:
    async with children() as pool:
        assert reason in await failure_of(pool, "give", value=value)
        assert (await run(pool, "give", value="2")).value == 2.0
        assert pool.counters.started == 1


async def test_an_exception_is_a_reason_with_its_place() -> None:
    async with children() as pool:
        reason = await failure_of(pool, "breaks")
        assert "KeyError" in reason and "rollout_programs.py, line" in reason
        assert "SystemExit" in await failure_of(pool, "leaves")
        assert "PolicyFault.reward" in await failure_of(pool, "fault", value="x")
        assert (pool.counters.started, pool.counters.failed) == (1, 3)


@pytest.mark.parametrize(("do", "reason"), [("dies", "SIGKILL"), ("ends", "exit code 3")])
async def test_a_child_that_ends_fails_its_episodes_and_another_is_started(
    tmp_path: Path, do: str, reason: str
) -> None:
    async with children(processes=1) as pool:
        other = asyncio.create_task(run(pool, "waits", id="2.0.a", file=str(tmp_path / "up")))
        await begun(tmp_path / "up")
        assert reason in await failure_of(pool, do)
        with pytest.raises(ProgramFailed, match=reason):
            await other
        assert (await run(pool, "give", value="2")).value == 2.0
        assert pool.counters.started == 2


async def test_an_episode_that_needs_more_memory_than_its_child_may_have_fails_with_that_reason(tmp_path: Path) -> None:
    async with children(processes=1, memory_mb=256) as pool:
        beside = asyncio.create_task(run(pool, "waits", id="2.0.a", file=str(tmp_path / "up")))
        await begun(tmp_path / "up")
        assert (await run(pool, "hoards", mb=64)).value == 1.0
        assert pool.counters.killed == 0
        reason = await failure_of(pool, "hoards", mb=300)
        assert "want at most 256 MB of private memory (rollouts.NAME.memory_mb): MemoryError" in reason
        assert "rollout_programs.py, line" in reason
        with refusal(ProgramFailed, reason=re.compile(r"rollouts\.NAME\.memory_mb"), ended=True) as found:
            await beside
        assert found.value.ended, "the turns of the other episode are as good as before"
        assert (await run(pool, "hoards_below", mb=300)).value == 1.0, (
            "a process below it has the limit, too, and ends with an error"
        )
        assert (await run(pool, "hoards_below", mb=64)).value == 0.0
        assert (await run(pool, "give", value="2")).value == 2.0
        assert (pool.counters.started, pool.counters.killed) == (2, 1)


async def test_files_and_processor_time_have_limits_where_they_are_set(tmp_path: Path) -> None:
    async with children(processes=1, cpu_s=2, open_files=60, file_mb=1) as pool:
        assert (await run(pool, "opens", count=10)).value == 1.0
        assert "Too many open files" in await failure_of(pool, "opens", count=60)
        assert (await run(pool, "writes", file=str(tmp_path / "small"), mb=1)).value == 1.0
        assert "File too large" in await failure_of(pool, "writes", file=str(tmp_path / "large"), mb=2)
        assert pool.counters.started == 1
        assert "killed by SIGXCPU (its processor time, rollouts.NAME.cpu_s)" in await failure_of(pool, "spins")
        assert (await run(pool, "give", value="2")).value == 2.0
        assert pool.counters.started == 2
    async with children() as pool:
        assert (await run(pool, "opens", count=60)).value == 1.0
        assert (await run(pool, "writes", file=str(tmp_path / "large"), mb=2)).value == 1.0


async def test_a_limit_of_files_that_is_refused_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import resource\nresource.setrlimit = lambda kind, limits: resource.RLIM_NONE\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:. exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    async with children(python=str(python), open_files=60) as pool:
        with refusal(ProgramFailed, reason=re.compile(r"rollouts\.NAME\.open_files: want 0 .*\b60\b"), ended=False):
            await pool.load()


async def test_without_a_limit_memory_is_that_of_the_machine() -> None:
    async with children() as pool:
        assert (await run(pool, "hoards", mb=300)).value == 1.0


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("resource.setrlimit = lambda kind, limits: None", "does not hold the limit 256"),
        ("resource.setrlimit = lambda kind, limits: resource.RLIM_NONE", "refuses the limit 256"),
        ("sys.modules['resource'] = None", "refuses the limit 256"),
    ],
)
async def test_a_limit_that_cannot_be_held_is_refused(tmp_path: Path, lines: str, reason: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import resource, sys\n{lines}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:. exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    async with children(python=str(python), memory_mb=256) as pool:
        with pytest.raises(ProgramFailed, match=reason) as found:
            await pool.load()
        assert "rollouts.NAME.memory_mb: want 0 (no limit)" in found.value.reason
    async with children(python=str(python)) as pool:
        assert (await run(pool, "give", value="2")).value == 2.0


async def test_many_episodes_share_children_up_to_their_number(tmp_path: Path) -> None:
    async with children(processes=2, episodes_per_child=3, kill_after_s=60.0) as pool:
        waiting = [
            asyncio.create_task(run(pool, "waits", id=f"{n}.0.a", file=str(tmp_path / str(n)))) for n in range(6)
        ]
        for n in range(6):
            await begun(tmp_path / str(n))
        assert pool.counters.started == 2 and len(pool.pids) == 2
        late = asyncio.create_task(run(pool, "give", id="7.0.a", value="1"))
        await asyncio.sleep(0.05)
        assert not late.done()
        waiting[0].cancel()
        assert (await late).value == 1.0
        assert pool.counters.killed == 0, "the cancelled one ended by itself"
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("do", ["holds_on", "blocks", "grandchild"])
async def test_a_program_that_does_not_end_is_killed_with_all_below_it(tmp_path: Path, do: str) -> None:
    file = tmp_path / "up"
    async with children(processes=1) as pool:
        stuck = asyncio.create_task(run(pool, do, file=str(file)))
        await begun(file)
        (pid,) = pool.pids
        beside = asyncio.create_task(run(pool, "waits", id="2.0.a", file=str(tmp_path / "beside")))
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        with refusal(ProgramFailed, reason=re.compile(r"\b1\.0\.a\b"), ended=True):
            await beside
        await ended(pid)
        if do == "grandchild":
            await ended(int((tmp_path / "up.pid").read_text()))
        assert pool.counters.killed == 1
        assert (await run(pool, "give", value="2")).value == 2.0


async def test_a_plain_function_runs_in_a_thread_and_is_killed_if_it_does_not_end(tmp_path: Path) -> None:
    async with children("tests.rollout_programs:plain", options={"scale": 2.0}) as pool:
        assert (await run(pool, "")).value == 2.0
    async with children("tests.rollout_programs:slow") as pool:
        stuck = asyncio.create_task(run(pool, "", file=str(tmp_path / "up")))
        await begun(tmp_path / "up")
        (pid,) = pool.pids
        stuck.cancel()
        with suppress(asyncio.CancelledError):
            await stuck
        await ended(pid)


@pytest.mark.parametrize(
    "rubbish",
    [
        "\xff\xff\xff\xffxx",
        "\x00\x00\x00\x02xx",
        "\x00\x00\x00\x02[]",
        "\x00\x00\x00\x02{}",
        "\x00\x00\x00\x0e" + '{"type": "up"}',
    ],
)
async def test_a_child_that_writes_rubbish_is_ended(rubbish: str) -> None:
    async with children() as pool:
        assert "its process wrote" in await failure_of(pool, "rubbish", value=rubbish)
        assert pool.counters.killed == 1
        assert (await run(pool, "give", value="2")).value == 2.0


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("tests.nowhere:Agent", "No module named 'tests.nowhere'"),
        ("tests.rollout_programs:Nobody", "Nobody"),
        ("tests.rollout_programs:not_callable", "got int"),
        ("tests.rollout_programs:Refuses", "no licence"),
        ("tests.rollout_programs:Idle", "a method run"),
        ("tests.rollout_programs:Agent", "colour"),
        (
            "tests.rollout_programs:Hoards",
            "want at most 256 MB of private memory (rollouts.NAME.memory_mb): MemoryError",
        ),
    ],
)
async def test_a_program_that_cannot_be_loaded_is_a_reason_and_not_tried_again_at_once(
    use: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_children, "RESTART_S", math.inf)
    async with children(use, options={"colour": "blue"} if "Agent" in use else {}, memory_mb=256) as pool:
        for _ in range(3):
            with pytest.raises(ProgramFailed) as found:
                await pool.load()
            assert reason in found.value.reason
        assert pool.counters.started == 1


async def test_a_child_that_is_killed_while_it_loads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_slow.py").write_text(
        "import os, time\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}.loading', 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "    time.sleep(0.01)\n"
        "def program(data):\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with children("own_slow:program") as pool:
        loading = asyncio.create_task(pool.load())
        found = await until(lambda: list(tmp_path.glob("*.loading")))
        os.kill(int(found[0].stem), signal.SIGKILL)
        (tmp_path / "go").touch()
        await loading
        assert pool.counters.started == 2 and (await run(pool, "")).value == 1.0
    async with children(python="/bin/false") as pool:
        with refusal(ProgramFailed, reason=re.compile(r"\bexit code 1$"), ended=True):
            await pool.load()
        assert pool.counters.started == LOADS


async def test_an_interpreter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of the episodes stay, also of those that fail at once after another one's child was not started: no
    program has run.
    """
    monkeypatch.setattr(episode_children, "RESTART_S", math.inf)
    for python, reason in (("/nowhere/python3", "/nowhere/python3"), ("/bin/false", "exit code 1")):
        async with children(python=python) as pool:
            for _ in range(2):
                with pytest.raises(ProgramFailed, match=reason) as found:
                    await run(pool, "give", value="1")
                assert found.value.ended
            assert pool.counters.started <= 1, "not tried again at once"


async def test_an_interpreter_without_any_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's program is one file of the standard library; packages of the user's program are on PYTHONPATH."""
    (tmp_path / "own.py").write_text(
        "import sys\n\ndef program(data):\n    return float('numpy' in sys.modules or sys.flags.no_site)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with children("own:program", python=str(python)) as pool:
        assert (await run(pool, "")).value == 1.0


OF_CLIENTS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")


async def test_a_child_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_BUS__TOKEN", "secret")
    monkeypatch.setenv("NATS_PASSWORD", "secret")
    for name in OF_CLIENTS:
        monkeypatch.delenv(name, raising=False)
    async with children(episodes_per_child=2) as pool:
        assert (await run(pool, "environment")).value == {}
    async with children(episodes_per_child=1) as pool:
        assert (await run(pool, "environment")).value == dict.fromkeys(OF_CLIENTS, 1.0)


async def test_children_end_with_their_actor(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.contract.test_rollout_children import children, run, begun, Path\n"
        "async def main():\n"
        "    async with children() as pool:\n"
        f"        asyncio.create_task(run(pool, 'blocks', file={str(tmp_path / 'up')!r}))\n"
        f"        await begun(Path({str(tmp_path / 'up')!r}))\n"
        "        print(*pool.pids, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as actor:
        assert actor.stdout is not None
        pid = int(await asyncio.to_thread(actor.stdout.readline))
        actor.kill()
    async with asyncio.timeout(LIMIT_S):
        await ended(pid)


async def test_values_that_json_does_not_have_are_refused() -> None:
    async with children() as pool:
        assert "JSON" in await failure_of(pool, "give", value={1, 2})


@pytest.mark.parametrize("descriptor", [1, 2])
@pytest.mark.parametrize("broken", ["full", "closed"])
async def test_a_program_that_prints_does_not_fail_where_its_output_cannot_be_written(
    descriptor: int, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "full":
        unwritable = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, unwritable = os.pipe()
        os.close(reader)
    before = os.dup(descriptor)
    os.dup2(unwritable, descriptor)
    try:
        async with children() as pool:
            assert (await run(pool, "loud")).value == 1.0
            assert (await run(pool, "loud", id="2.0.a")).value == 1.0
            assert pool.counters.started == 1
    finally:
        os.dup2(before, descriptor)
        os.close(before)
        os.close(unwritable)
    reports = [
        record.getMessage() for record in caplog.records if "output of a rollout program is lost" in record.getMessage()
    ]
    assert len(reports) == 1, reports
