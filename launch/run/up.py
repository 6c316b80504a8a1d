"""``tidemill up``: a whole run on this machine, with a live view, and its accounting at the end.

    prepare -> bus -> teachers, engines, actors, learner (each a process, kept by the supervisor) -> the learner ends
            -> actors and engines drain -> audit of the streams -> summary.json, metrics.jsonl, curves.png -> bus ends

Consumes the end of the learner; waits for it, for a process that is given up, or for Ctrl-C, which drains in the order
actors and learner, engines, bus. A run that is drained behind a step has the same files; ``--resume`` continues it.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path

from rich.console import Console

from tidemill.bus import exit_codes
from tidemill.bus.config import needed_bytes
from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus, connect, current_epoch
from tidemill.bus.system.coroutines import beside, first_of
from tidemill.bus.system.files import lacking, write_whole
from tidemill.bus.system.output import STANDARD_OUTPUT, lossy
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import Outcome
from tidemill.launch.checks.findings import CheckFailed
from tidemill.launch.checks.run import Purpose, check, made_before
from tidemill.launch.hub.repository import write_record
from tidemill.launch.run import access, desired, process, servers, summary, view, web_hook
from tidemill.launch.run.accounting import read_accounts
from tidemill.launch.run.bus_process import BUS_START_S, start_bus
from tidemill.launch.run.directory import CannotBegin, directory_of_one
from tidemill.launch.run.engine_devices import EngineDevices
from tidemill.launch.run.host import Host
from tidemill.launch.run.run_end import end_of
from tidemill.launch.run.servers import keep_page
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.run.watch import LOOK_EVERY_S, RunWatch
from tidemill.launch.run.web_hook import WebHook
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import Loaded, to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY
from tidemill.learner.feed.history import removed_steps

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
WRONG_USE = 2  # Exit code of CannotBegin
CANCELLED_S = 5.0  # Seconds that processes have to end after a second signal
HOST = "up"  # Name of this process among the hosts of the run
DRAINED = "drained"  # Reason of the end in the summary of a run that goes on with `--resume`
# Exit code when the run is complete and its accounting does not balance, or its reward is below `up.require_reward`.
BROKEN_PROMISE = 3


def run_up(config: RunConfig, *, resume: bool, fresh: bool, after_epoch: int = 0) -> int:
    """Run all of it and return the exit code: 0 done or drained, 1 a process was given up, 2 wrong use, 3 a promise was
    broken, 75 not drained in time, 78 settings or data that no restart can cure. ``after_epoch``: scores up to it in
    the log are of another run.

    Raises CannotBegin when the run's directory does not fit the command, ValueError for a web hook that is no URL.
    """
    web_hook.checked_url(os.environ.get(web_hook.VARIABLE, ""))
    if fresh and Path(config.learner.from_checkpoint).is_relative_to(config.root.resolve()):
        kept = config.learner.from_checkpoint
        cure = "set another directory (--set directory=NEW)"
        raise CannotBegin(f"--fresh: would remove the checkpoint to begin with, {kept}; {cure}")
    console = Console(file=lossy(STANDARD_OUTPUT), highlight=False, soft_wrap=True)
    log_file = config.root / "logs" / "up.log"
    with directory_of_one(config.root, resume=resume, fresh=fresh):
        log_to_file(log_file)
        run = Up(config, console, resume=resume, after_epoch=after_epoch)
        code = process.run(run.run, drain_s=config.up.drain_s * 4 + 60, uvloop=False, on_event=run.event)
    if code and not run.failure:
        run.failure = "not drained in time" if code == process.NOT_IN_TIME else f"crashed; the reason is in {log_file}"
    if run.failure:
        console.print(run.failure, style="red", markup=False)
    return code or run.code


def log_to_file(file: Path) -> None:
    """Send this process's log lines to a file; the terminal belongs to the view. A full disk loses lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler(lossy(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s up: %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.CRITICAL)


async def with_bus(
    work: Coroutine[object, object, None], bus: Bus, supervisor: Supervisor, *, away_s: float = BUS_START_S
) -> None:
    """Run ``work``, which waits for the bus without end, when no process and no view is left that reports its absence.

    Raises GaveUp when the bus is not started again, and BusUnavailable when it is away for ``away_s``.
    """

    async def away() -> None:
        while True:
            await bus.wait_connected(away_s)
            await asyncio.sleep(LOOK_EVERY_S)

    await first_of(work, supervisor.failed(), away())


class Up:
    """One start of a run on this machine."""

    def __init__(self, config: RunConfig, console: Console, *, resume: bool, after_epoch: int = 0) -> None:
        self._after_epoch = after_epoch
        self._ports = contextlib.ExitStack()  # Ports of the teachers that it starts
        self._config, self._console, self._resume = servers.placed(config, self._ports), console, resume
        self._root = config.root
        self.supervisor = Supervisor(
            self._root / "logs", restarts=config.up.restarts, window_s=config.up.restart_window_s, on_event=self.event
        )
        self._watch: RunWatch | None = None
        self._host: Host | None = None
        self.code = process.DONE
        self.failure = ""
        self._finished = False
        self._ended_by = ""  # Reason of an end before `learner.steps`
        self._viewed = False  # True while the view shows the watch's events
        self._drain_s = config.up.drain_s
        self._notices = WebHook.of(config, os.environ.pop(web_hook.VARIABLE, ""))  # no child inherits it

    def event(self, text: str) -> None:
        """Log an event and show it on the terminal."""
        if self._watch is not None and self._viewed:
            self._watch.event(text)
        else:
            self._print(text)

    async def run(self, draining: asyncio.Event) -> None:
        """Start the processes, wait for the learner and drain them; the result is in ``code`` and ``failure``."""
        async with self._notices.sending():
            try:
                await self._run(draining)
            finally:
                step = 0 if self._watch is None else self._watch.step
                how = self.failure or ("the run is complete" if self._finished else "drained")
                self._notices.ended(f"{how} (step {step} of {self._config.learner.steps})", self.code)

    async def _run(self, draining: asyncio.Event) -> None:
        self._write_config()
        self._print(f"{self._config.run}: files and logs in {self._root}")
        try:
            await self._prepare()
            await self._check_prepared()
            url = await self._start_bus()
            address = access.own_address(self._config, url)
            async with connect(address, self._config.run, self._config.bus, name="up", wait_s=BUS_START_S) as bus:
                await bus.create_layout()
                await self._refuse_another_run(bus, url)
                await self._train(bus, url, draining)
        except asyncio.CancelledError:
            self._drain_s = min(self._drain_s, CANCELLED_S)
            self.failure = f"not drained in time; still running: {', '.join(self.supervisor.running) or 'no process'}"
            raise
        except (CannotBegin, CheckFailed) as error:
            self.code, self.failure = getattr(error, "exit_code", WRONG_USE), str(error)
        except (GaveUp, BusError) as error:
            self.code, self.failure = exit_codes.of(error), str(error)
            if isinstance(error, GaveUp):
                self._notices.given_up(self.failure)
        except OSError as error:  # of a disk without room: the log has none for the traceback either
            log.error("crashed", exc_info=error)
            self.code = exit_codes.CRASHED
            self.failure = f"{error.filename or self._root}: {error.strerror or error}; {self._cure}"
        finally:
            await self._drain()
            await self.supervisor.end(self.supervisor.names("bus"), within_s=self._drain_s)
            self._ports.close()

    async def _refuse_another_run(self, bus: Bus, url: str) -> None:
        """Raise CannotBegin if the bus (``bus.url``) holds a run of this name: the streams would mix."""
        if not self._resume and await bus.tasks.last_id() > 0:
            cure = "resume it (--resume), or give this one a name (--set run=...)"
            raise CannotBegin(f"{url}: has a run named {bus.run} already; {cure}")

    def _print(self, text: str) -> None:
        log.info("%s", text)
        self._console.print(text, markup=False)

    def _write_config(self) -> None:
        values = to_map(self._config)
        write_whole(self._root / CONFIG_FILE, yaml_file.dump(recorded(values)))
        write_record(self._root, values)

    def _arguments(self, command: str) -> list[str]:
        return [command, "--config", str(self._root / CONFIG_FILE)]

    async def _prepare(self) -> None:
        """Run ``prepare`` in a process of its own: it loads torch, this one never does. Raises GaveUp."""
        if self._config.prepare is None or made_before(self._config) is not None:
            return
        arguments = ["prepare", str(self._root / CONFIG_FILE)]
        child = process.launched("prepare", arguments, self._root / "logs" / "prepare.log")
        await child.start()
        code = await child.wait()
        if code:
            raise GaveUp("prepare", code, 1, 0, child.last_lines(), child.reason())

    async def _check_prepared(self) -> None:
        if self._config.prepare is not None:
            (await asyncio.to_thread(check, Loaded(self._config, {}), Purpose())).refuse()

    async def _start_bus(self) -> str:
        if self._config.bus.url:
            return self._config.bus.url
        if lack := self._room():
            raise CheckFailed([f"the bus is not started: {lack}"])
        return await start_bus(self._config, self.supervisor)

    def _room(self) -> str:
        return "" if self._config.bus.url else lacking(self._root / "bus", needed_bytes(self._config.bus))

    async def _train(self, bus: Bus, url: str, draining: asyncio.Event) -> None:
        metrics = self._root / METRICS_FILE
        earlier = summary.seconds_of_steps(metrics)
        lines = summary.lines_of_removed(metrics, await removed_steps(bus))
        for file in (metrics, self._root / summary.EVALUATIONS_FILE):
            file.unlink(missing_ok=True)  # the watch writes them again, from the records of PLAN
        if lines:  # the bus no longer has the records of these steps
            summary.write_lines(metrics, lines)
        steps, after_epoch = self._config.learner.steps, self._after_epoch
        self._watch = RunWatch(
            bus, steps=steps, metrics_file=metrics, earlier=earlier, room=self._room, after_epoch=after_epoch
        )
        self._notices.after_epoch, self._watch.on_record = await current_epoch(bus), self._notices.record
        page = [keep_page(self._root, bus.run, url, self._print)] if self._config.up.dashboard else []
        async with self._shown(), beside(*page):
            if not self._config.debug.trains_only:
                for name, arguments in servers.commands(self._config).items():
                    self.supervisor.keep(name, arguments)
            # Node 0 whatever a launcher's variables say: this learner is no process of a launcher.
            words = [*self._arguments("learner"), "--bus", url, "--checked", "--node-rank", "0"]
            learner = self.supervisor.keep("learner", words, finishes=True)
            self._host = Host(
                bus,
                self.supervisor,
                desired.LiveHost(HOST),
                arguments=lambda role, process_id: [*self._arguments(role), "--bus", url, "--id", process_id],
                drain_s=self._config.up.drain_s,
                devices=EngineDevices(bus, None if self._config.debug.rollout_only else self._config),
            )
            await self._want(bus)
            enough = asyncio.Event()
            hosting = asyncio.create_task(self._host.run(enough, drain=False), name="host")
            try:
                is_over = await self._until({learner, hosting}, draining)
            finally:
                enough.set()
                await asyncio.gather(hosting, return_exceptions=True)
            if is_over and not await self._trained_to_the_end(bus):
                self.event("the learner was drained by a signal of another program, so the run is drained")
            await self._drain()
        self._finished = finished = not self.code and await self._trained_to_the_end(bus)
        if finished or (self._watch.step and not self.code):
            await with_bus(self._audit(bus, self._watch.elapsed_s, finished=finished), bus, self.supervisor)
        if not finished:
            who = "the learner" if is_over else "all"
            self._print(f"{who} drained at step {self._watch.step} of {self._watch.steps}; {self._cure}")

    @property
    def _cure(self) -> str:
        return f"resume with: tidemill up {self._root / CONFIG_FILE} --resume"

    @contextlib.asynccontextmanager
    async def _shown(self) -> AsyncIterator[None]:
        assert self._watch is not None
        live = self._config.up.view == "live" or (self._config.up.view == "auto" and self._console.is_terminal)
        title = f"tidemill {self._config.run}"
        shown = (
            view.show_live(self._watch, title, self._console) if live else view.show_plain(self._watch, self._console)
        )
        self._viewed = True
        try:
            async with beside(self._watch.run(), shown):
                yield
        finally:
            self._viewed = False

    async def _trained_to_the_end(self, bus: Bus) -> bool:
        """Return whether the last step is in a checkpoint: a learner that was drained ends with code 0, too."""
        if self._config.debug.trains_only:  # it makes no checkpoint
            done = [record.step async for _, record in bus.plans.scan() if isinstance(record, Done)]
            return max(done, default=0) >= self._config.learner.steps
        checkpoint, end = await bus.rows("run").get(CHECKPOINT_KEY), await end_of(bus)
        step = 0 if checkpoint is None else int(checkpoint[0]["step"])
        if step >= self._config.learner.steps:
            return True
        if end is not None and end.outcome is Outcome.DONE and end.step == step and end.reason != "learner.steps":
            self._ended_by = end.reason
        return bool(self._ended_by)

    async def _want(self, bus: Bus) -> None:
        """Set the desired numbers to the configuration's; a resumed run keeps the last ones of `tidemill scale`."""
        numbers = self._config.up
        counts = {"engine": numbers.engines, "actor": numbers.actors, "scorer": numbers.scorers}
        if self._config.debug.trains_only:
            counts = dict.fromkeys(counts, 0)
        now = await desired.begin(bus, counts, keep=self._resume)
        if now != counts:
            self.event("as scaled: " + ", ".join(f"{role}s {count}" for role, count in sorted(now.items())))

    async def _until(self, works: set[asyncio.Task[None]], draining: asyncio.Event) -> bool:
        """Return True when one of ``works`` has ended well, False on ``draining``. Raises their errors, GaveUp."""
        await first_of(*map(asyncio.shield, works), self.supervisor.failed(), draining.wait())
        return any(work.done() for work in works)

    async def _drain(self) -> None:
        within_s = self._drain_s
        if self._watch is not None:
            self._watch.ending = True
        if self._host is not None:
            await self._host.settled()
        learner = self.supervisor.names("learner")
        codes = await self.supervisor.end(self.supervisor.names("actor") + learner, within_s=within_s + 10)
        for code in (codes[name] for name in learner):
            if not self.code and code not in (0, None, -signal.SIGTERM):  # the latter: it had not begun
                in_time = code not in (exit_codes.NOT_IN_TIME, -signal.SIGKILL)
                self.code = exit_codes.CRASHED if in_time else exit_codes.NOT_IN_TIME
                how = exit_codes.how(code) if in_time else f"was not drained within {within_s:.0f} s (up.drain_s)"
                self.failure = f"the learner {how}; log: {self._root}/logs/learner.log"
        names = [name for role in ("engine", "scorer", "teacher") for name in self.supervisor.names(role)]
        await self.supervisor.end(names, within_s=within_s)

    async def _audit(self, bus: Bus, seconds: float, *, finished: bool) -> None:
        assert self._watch is not None
        async with summary.audit_shown(bus, self._print) as progress:
            accounts = await read_accounts(
                bus,
                self._config,
                checkpoints=self._config.checkpoints,
                after_epoch=self._after_epoch,
                progress=progress,
            )
        reached = self._watch.reached_s
        lines = summary.lines_of_removed(self._root / METRICS_FILE, accounts.samples.removed_steps)
        lines += [
            line | {"seconds": round(reached.get(line["step"], seconds), 3)}
            for line in accounts.lines
            if line["step"] > accounts.samples.removed_steps
        ]
        summary.write_lines(self._root / METRICS_FILE, lines)
        if accounts.evaluations:
            summary.write_lines(self._root / summary.EVALUATIONS_FILE, accounts.evaluations)
        result = accounts.summary(
            lines=lines,
            observed=self._observed(lines, seconds),
            ended_by=self._ended_by or ("learner.steps" if finished else DRAINED),
            require_reward=self._config.up.require_reward if finished else -math.inf,
        )
        write_whole(self._root / "summary.json", json.dumps(result, indent=2) + "\n")
        title = f"{self._config.run}: {result['steps']} steps, {seconds:.0f} s"
        drawing = partial(summary.draw_curves, lines, accounts.evaluations, self._root / "curves.png", title)
        self._report(result, await asyncio.to_thread(drawing), finished=finished)
        if accounts.best is not None:
            self._print(f"  best checkpoint {summary.best_in_words(accounts.best)}")

    def _observed(self, lines: list[JsonObject], seconds: float) -> summary.Observed:
        assert self._watch is not None
        return summary.Observed(
            seconds=seconds,
            seconds_to_reward=summary.seconds_to_reward(lines, 0.9),
            loads=self._watch.loads,
            troubles=self._watch.troubles,
            aborted_by_pushes=int(sum(self._watch.aborted_by_pushes.values())),
            restarts=self.supervisor.restarted,
        )

    def _report(self, result: JsonObject, picture: str, *, finished: bool) -> None:
        if self._ended_by:
            self._print(f"  ended after step {result['steps']}: {self._ended_by}")
        self._print("\n".join(f"  {name:<26} {summary.as_text(result[name])}" for name in summary.REPORTED))
        for words in summary.newest_scores_in_words(self._watch.evaluated.values()) if self._watch is not None else ():
            self._print(f"  evaluation {words}")
        for name, trouble in self._watch.troubles.items() if self._watch is not None else ():
            self._print(f"  {name}: {trouble}")
        model = "no model: nothing was trained" if self._config.debug.rollout_only else f"model {self._root}/final"
        model += "" if finished else f" of step {result['steps']}, not finished"
        self._print(f"  {model}, picture {picture}, accounting {self._root}/summary.json")
        if broken := result["promises_broken"]:
            self.code, self.failure = BROKEN_PROMISE, "promises broken:\n" + "\n".join(f"  {text}" for text in broken)
