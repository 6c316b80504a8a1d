"""``tidemill eval``: the scores of a model on held-out prompts, without a learner.

    bus -> engines (version 0: the model) and actors -> tasks of kind eval -> samples -> scores -> all of them end

Prompts, rewards, sampling and seeds are the same as in the evaluation beside training
(``learner/evaluation/evaluations.py``), so a checkpoint gets the scores here that its version got there, as far as
engines give the same tokens.
"""

import asyncio
import logging
from dataclasses import asdict, replace
from pathlib import Path

from tidemill.bus.streams.bus import Bus, connect, raise_epoch
from tidemill.bus.system.coroutines import cancellable, first_of
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.messages import Dead, Evaluated, Kind, Sample, Sampling, Status, Task
from tidemill.launch.run import access, feeder_process, summary
from tidemill.launch.run.bus_process import BUS_START_S, start_bus
from tidemill.launch.run.supervisor import Supervisor
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded
from tidemill.learner.buffer.failures import UNTRAINED_SHARE, FailingTasks
from tidemill.learner.evaluation.evaluations import EvalPlan, Evaluations
from tidemill.weightstore.store.registry import VersionRegistry

log = logging.getLogger(__name__)


async def evaluate(config: RunConfig, draining: asyncio.Event) -> list[Evaluated]:
    """Return the scores of ``config.model.path`` on each of ``config.eval.sets``; none if drained first."""
    write_whole(config.root / CONFIG_FILE, yaml_file.dump(recorded(to_map(config))))
    supervisor = Supervisor(config.root / "logs", restarts=config.up.restarts, window_s=config.up.restart_window_s)
    plan = await asyncio.to_thread(_plan, config)
    try:
        url = await start_bus(config, supervisor)
        address = access.own_address(config, url)
        async with connect(address, config.run, config.bus, name="eval", wait_s=BUS_START_S) as bus:
            await bus.create_layout()
            for role, count in (("engine", config.up.engines), ("actor", config.up.actors)):
                for name in (f"{role}-{number}" for number in range(count)):
                    words = ["--config", str(config.root / CONFIG_FILE), "--bus", url, "--id", name]
                    supervisor.keep(name, [role, *words])
            evaluating = asyncio.create_task(_scores(bus, plan, config), name="evaluation")
            try:
                await first_of(asyncio.shield(evaluating), supervisor.failed(), draining.wait())
                return evaluating.result() if evaluating.done() else []
            finally:
                evaluating.cancel()
                await asyncio.gather(evaluating, return_exceptions=True)
    finally:
        for role in ("actor", "engine", "bus"):
            await supervisor.end(supervisor.names(role), within_s=config.up.drain_s)


def _plan(config: RunConfig) -> EvalPlan:
    _, max_context = feeder_process.model_shape(Path(config.model.path))
    return feeder_process.eval_plan(config, Sampling(**asdict(config.sampling)), max_context)


async def _scores(bus: Bus, plan: EvalPlan, config: RunConfig) -> list[Evaluated]:
    """Take the learner's place on the bus: publish version 0, issue tasks, read samples. Raises TasksFail."""
    epoch = await raise_epoch(bus)
    await bus.plans.fence(epoch)
    await bus.tasks.fence(epoch)
    registry = VersionRegistry(bus)
    await registry.fence(epoch)
    await registry.publish_initial(config.model.path, epoch)

    async def store(task: Task) -> Task:
        return replace(task, id=await bus.tasks.issue(task))

    rounds = await asyncio.to_thread(plan.rounds)
    evaluations = Evaluations(bus, plan, rounds, epoch=epoch, store=store)
    evaluations.published(0, 0)
    failing = FailingTasks()

    async def read() -> None:
        async for received in bus.samples.read(None, kinds=(Kind.EVAL,)):
            if isinstance(received.sample, Sample):
                evaluations.arrived(received.sample)
                if received.sample.status is not Status.FAILED:
                    failing.completed()

    async def follow_dead() -> None:
        async for _, letter in bus.dead.follow():
            if isinstance(letter, Dead):
                evaluations.gone(letter)
                failing.died(letter)
                failing.refuse(config.learner.failing_tasks, config.learner.failing_s * UNTRAINED_SHARE)

    await first_of(evaluations.over(), *(cancellable(loop) for loop in (evaluations.run(), read(), follow_dead())))
    return [record for _, record in sorted((await summary.read_scores(bus)).items())]
