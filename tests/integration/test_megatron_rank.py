"""Real ranks on a real feeder and a real bus, with scripted actors: a run to its end, a killed one, a drained one."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.algorithm_settings import algorithm_of
from tests.data_kit import sample
from tests.examples import rarely
from tests.feeder_kit import KEYS, World
from tests.forked import Forked
from tests.integration import megatron_rank_process
from tests.integration.test_weightstore_publisher import state
from tests.learner_steps import rank_environment
from tests.receiver_app import Behaviour, digest, receivers
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model, write_tiny_pond
from tests.waits import until
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Done, Plan, Sample, Task
from tidemill.learner.checkpoints.disk import listed
from tidemill.learner.debug.config import ProfileRequest, write_request
from tidemill.learner.debug.train_file import read_train
from tidemill.learner.errors import RankFailed, RanksLeft
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

SETTINGS: dict[str, Any] = {
    "steps": 5,
    "groups_per_step": 2,
    "group_size": 2,
    "checkpoint_every": 2,
    "max_tokens_per_micro_batch": 16,
}


@dataclass
class Learner:
    """A world, and ranks for it."""

    world: World
    directory: Path
    settings: dict[str, Any]
    staleness: dict[str, Any]
    weights: dict[str, Any]
    algorithm: dict[str, Any]
    debug: dict[str, Any]
    hooks: dict[str, str]
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    respond: Callable[[Task, int], Sample] | None = None
    """Response of the scripted actors; None = the world's own."""
    ranks: list[Forked] = field(default_factory=list)
    roots: list[Path] = field(default_factory=list)
    """Root of the checkpoints of each rank, which is a node then; empty = the world's, for all."""

    @asynccontextmanager
    async def started(self, *, steps: int | None = None) -> AsyncIterator[None]:
        """Run feeder, actors and ranks; all are gone when the block is left.

        ``steps``: there are samples for so many from now on, so that no rank has taken more before it is killed. None =
        for all.
        """
        self.world.taken.clear()
        self.world.most_tasks = None if steps is None else steps * self.world.learner.groups_per_step
        with KeptPort() as kept:
            async with (
                self.world.actors(self.respond),
                self.world.feeder() as (url, feeding),
                self._ranks(url, feeding, kept.number),
            ):
                yield

    @asynccontextmanager
    async def started_without_actors(self) -> AsyncIterator[None]:
        """Run feeder and ranks; all are gone when the block is left."""
        with KeptPort() as kept:
            async with self.world.feeder() as (url, feeding), self._ranks(url, feeding, kept.number):
                yield

    @asynccontextmanager
    async def followed(self, **changes: Any) -> AsyncIterator[tuple["Learner", str]]:
        """Yield a second run on the same bus, in the directory ``second``, with ``changes`` of its settings, and its
        engine's URL.
        """
        root, name = self.directory / "second", f"{self.world.run}-second"
        root.mkdir()
        settings = {**self.settings, **changes}
        async with connect(self.world.url, name, self.world.config, name="test", wait_s=60) as bus:
            await bus.create_layout()
            learner = LearnerConfig(**settings)
            world = replace(self.world, run=name, bus=bus, root=root, learner=learner, digests={}, batches=[])
            engine = receivers(world.url, name, {"good": Behaviour()})
            engines = await asyncio.to_thread(engine.__enter__)
            try:
                yield replace(self, world=world, settings=settings, ranks=[]), engines["good"][0]
            finally:
                await asyncio.to_thread(engine.__exit__, None, None, None)

    @asynccontextmanager
    async def _ranks(self, url: str, feeding: Any, port: int) -> AsyncIterator[None]:
        world_size = self.world.learner.num_ranks
        places = {
            "run": self.world.run,
            "bus_url": self.world.url,
            "feeder_url": url,
            "feeder_keys": asdict(KEYS),
            "model_dir": str(self.directory / "model"),
            "checkpoints": str(self.world.root),
            "snapshots": str(self.directory / "snapshots"),
            "final_dir": str(self.directory / "final"),
        }
        nodes = [{"node": node, "checkpoints": str(root)} for node, root in enumerate(self.roots)] or [{}] * world_size
        settings = {
            "learner": self.settings,
            "algorithm": self.algorithm,
            "hooks": self.hooks,
            "optimizer": self.optimizer,
        }
        settings |= {"staleness": self.staleness, "weights": self.weights, "debug": self.debug}
        logs = [self.directory / f"rank-{rank}.log" for rank in range(world_size)]
        self.ranks = [
            await asyncio.to_thread(
                Forked,
                megatron_rank_process.run,
                ({"places": places | nodes[rank], **settings},),
                rank_environment(rank, world_size, port),
                log,
            )
            for rank, log in enumerate(logs)
        ]
        self.feeding = feeding
        try:
            yield
        finally:
            for rank in self.ranks:
                if rank.returncode is None:
                    rank.kill()
            await self.ended()
            print(*(log.read_text() for log in logs), sep="\n")  # shown when a test fails

    async def ended(self) -> list[int]:
        return list(await asyncio.gather(*(rank.ended() for rank in self.ranks)))

    async def finish(self) -> None:
        async with self.started():
            assert await self.ended() == [0] * len(self.ranks)
            await self.feeding

    def change(self, *, optimizer: dict[str, Any], algorithm: dict[str, Any], **settings: Any) -> None:
        """Change the settings of the next start."""
        self.optimizer, self.algorithm, self.settings = optimizer, algorithm, self.settings | settings
        algorithms, rates = algorithm_of(**algorithm), OptimizerConfig(**optimizer)
        self.world.learner = LearnerConfig(**self.settings, algorithm=algorithms, optimizer=rates)

    async def until(self, step: int) -> None:
        """Wait until the step's outcome is in the log."""
        async for _, record in self.world.bus.plans.follow():
            if isinstance(record, Done) and record.step >= step:
                return

    async def drained(self) -> None:
        """Wait for the end of a feeder whose ranks were drained by another program: an error, so that a supervisor
        starts it again.
        """
        with pytest.raises(RanksLeft):
            await self.feeding

    async def digests(self) -> dict[int, list[str | None]]:
        """Return the digests of the weights after each step, one for each time it was done."""
        found: dict[int, list[str | None]] = {}
        for record in await self.world.records():
            if isinstance(record, Done):
                found.setdefault(record.step, []).append(record.weights_digest)
        return found


OpenLearner = Callable[..., Any]


@pytest.fixture
def open_learner(nats_server: EmbeddedServer, run_id: str, tmp_path: Path) -> OpenLearner:
    (tmp_path / "checkpoints").mkdir()
    write_tiny_model(tmp_path / "model")

    @asynccontextmanager
    async def opened(
        *,
        staleness: dict[str, Any] | None = None,
        weights: dict[str, Any] | None = None,
        algorithm: dict[str, Any] | None = None,
        debug: dict[str, Any] | None = None,
        hooks: dict[str, str] | None = None,
        **changes: Any,
    ) -> AsyncIterator[Learner]:
        settings = {**SETTINGS, "weights_digest": True, "device": "cpu", **changes}
        lag = {"max_lag": 1, **(staleness or {})}
        async with connect(nats_server.url, run_id, BusConfig(lease_s=5.0), name="test", wait_s=60) as bus:
            await bus.create_layout()
            world = World(
                url=nats_server.url,
                run=run_id,
                bus=bus,
                root=tmp_path / "checkpoints",
                learner=LearnerConfig(
                    **settings, algorithm=algorithm_of(**(algorithm or {})), optimizer=OptimizerConfig(lr=1e-2)
                ),
                staleness=StalenessConfig(**lag),
                config=BusConfig(lease_s=5.0),
            )
            yield Learner(
                world=world,
                directory=tmp_path,
                settings=settings,
                staleness=lag,
                weights=weights or {},
                algorithm=algorithm or {},
                debug=debug or {},
                hooks=hooks or {},
            )

    return opened


@pytest.mark.parametrize("split", ["pipeline_parallel", *rarely(["data_parallel", "context_parallel"])])
async def test_two_ranks_train_push_checkpoint_and_end(open_learner: OpenLearner, tmp_path: Path, split: str) -> None:
    """Every step is done, every version is of a step, the final model has the last digest and loads in transformers.

    The debugging tools are those of all ranks: the report, a profile of the second one, and the dumps of a policy and
    its critic.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with_critic = split == "context_parallel"
    debug = {"save_train": f"{tmp_path}/{{step}}_{{rank}}"} if with_critic else {}
    write_request(tmp_path, ProfileRequest(steps=2, rank=1))
    async with open_learner(
        algorithm={"advantage": "gae"} if with_critic else {}, debug=debug, **{split: 2}
    ) as learner:
        await learner.finish()
        assert sorted(await learner.digests()) == [1, 2, 3, 4, 5]
        registry = VersionRegistry(learner.world.bus)
        head = await registry.head()
        assert head is not None and (head.version, head.step) == (5, 5)
        assert await registry.steps() == {version: version for version in range(6)}
        done = next(record for record in await learner.world.records() if isinstance(record, Done) and record.step == 5)
        assert 0 <= done.metrics["train/wait_share"] <= 1 and done.metrics["offpolicy/lag_max"] <= 1
    assert [path.name for path in (tmp_path / "debug").iterdir()] == ["profile_rank1_1_2.json.gz"]
    report = (tmp_path / "rank-0.log").read_text()
    assert "report step=1 ok   sampled text: ...'" in report and "memory, host: at most " in report
    if with_critic:
        assert [read_train(tmp_path / name).role for name in ("2_0", "2_0_critic")] == ["actor", "critic"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-4-epoch-1", "step-5-epoch-1"]
    final = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, tmp_path / "final", dtype=torch.float32)
    first = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, tmp_path / "model", dtype=torch.float32)
    assert not torch.equal(final.lm_head.weight, first.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "final").decode([5]) is not None


SHARES = {
    "data_parallel": 2,
    "distributed_optimizer": True,
    "offload_optimizer": True,
    "overlap_grad_reduce": "always",
    "overlap_param_gather": "always",
    "minibatches": 2,
}
"""Two replicas with a share of the optimizer's state each, in host memory."""


@pytest.mark.parametrize(
    ("staleness", "push_every", "changes"),
    [
        pytest.param({"max_lag": 2}, 2, SHARES, id="shares"),
        *rarely(
            [
                pytest.param({"max_lag": 0}, 1, {}, id="synchronous"),
                pytest.param({"max_lag": 2}, 2, {}, id="every-second-step"),
            ]
        ),
    ],
)
async def test_a_killed_rank_resumes_with_the_same_bits(
    open_learner: OpenLearner, staleness: dict[str, Any], push_every: int, changes: dict[str, Any]
) -> None:
    """It is killed after step 11 and resumed from the checkpoint of step 8: the steps are repeated, with the same
    digests.
    """
    async with open_learner(
        staleness=staleness, weights={"push_every": push_every}, steps=24, checkpoint_every=8, **changes
    ) as learner:
        async with learner.started(steps=12):
            await learner.until(11)
            for rank in learner.ranks:
                rank.kill()
            await learner.ended()
        before = await VersionRegistry(learner.world.bus).head()
        await learner.finish()
        digests = await learner.digests()
        assert sorted(digests) == list(range(1, 25))
        assert any(len(same) == 2 for same in digests.values()), f"nothing was done twice: {digests}"
        assert all(len(set(same)) == 1 for same in digests.values()), digests
        after = await VersionRegistry(learner.world.bus).head()
        assert before is not None and after is not None and after.step == 24
        assert after.version > before.version and after.epoch == 2
        plans = [record for record in await learner.world.records() if isinstance(record, Plan)]
        assert sorted({plan.step for plan in plans}) == list(range(1, 25))


@pytest.mark.parametrize("offload", [False, *rarely([True])])
async def test_steps_that_are_executed_again_have_the_settings_of_their_first_execution(
    open_learner: OpenLearner, offload: bool
) -> None:
    """A killed learner is started with another schedule, loss and clipping, and killed again while it repeats steps:
    bits and rates of each step are those of its first execution, behind the checkpoint and behind none.
    """
    first = {
        "optimizer": {"lr": 1e-2, "lr_decay": "linear", "clip_grad": 0.01},
        "algorithm": {"entropy": {"coef": 0.1, "target": 2.0}},
    }
    second = {"optimizer": {"lr": 3e-3, "warmup_steps": 20, "weight_decay": 0.5}, "algorithm": {"correction": "aipo"}}
    async with open_learner(
        staleness={"max_lag": 0}, steps=20, checkpoint_every=6, offload_optimizer=offload
    ) as learner:
        learner.change(**first)
        async with learner.started(steps=4):
            await learner.until(4)
            learner.ranks[0].kill()
            await learner.ended()
        for executed, changes in ((8, second), (10, first), (16, second | {"steps": 16})):
            learner.change(**changes)
            async with learner.started(steps=executed - max(await learner.digests())):
                if executed == 16:
                    assert await learner.ended() == [0]
                    await learner.feeding
                    break
                await learner.until(executed)
                learner.ranks[0].kill()
                await learner.ended()
        done = [record for record in await learner.world.records() if isinstance(record, Done)]
        rates: dict[int, set[float]] = {}
        for record in done:
            rates.setdefault(record.step, set()).add(record.metrics["train/lr"])
        assert len(done) > 16 and all(len(same) == 1 for same in rates.values()), rates
        assert all(len(set(same)) == 1 for same in (await learner.digests()).values())
        expected = {
            step: 1e-2 * (1 - (step - 1) / 20) if step <= 4 or 8 < step <= 10 else 3e-3 * step / 20
            for step in range(1, 17)
        }
        assert {step: rate for step, (rate,) in rates.items()} == pytest.approx(expected)


async def test_a_recorded_step_that_is_not_finite_is_skipped_whenever_it_is_taken(open_learner: OpenLearner) -> None:
    """It is killed after the step and before any checkpoint: the next start takes it from its plan, skips it, and has
    the same bits.

    The advantages that are not finite are those of an estimator that reads the metadata of samples.
    """

    def respond(task: Task, index: int) -> Sample:
        marked = (task.prompt_epoch, task.offset, index) == (0, 2, 0)  # in step 2
        metadata = {megatron_rank_process.MARK: 1} if marked else {}
        return sample(task, index, ((task.min_version, 2 + index),), reward=float(index), metadata=metadata)

    algorithm = {"advantage": f"{megatron_rank_process.__name__}:overflowing"}
    async with open_learner(staleness={"max_lag": 0}, algorithm=algorithm, steps=10, checkpoint_every=10) as learner:
        learner.respond = respond
        async with learner.started(steps=4):
            await learner.until(3)
            learner.ranks[0].kill()
            await learner.ended()
        await learner.finish()
        done = [record for record in await learner.world.records() if isinstance(record, Done)]
        skipped = {record.step: record.metrics["train/skipped_minibatches"] for record in done}
        assert skipped == {step: float(step == 2) for step in range(1, 11)}
        digests = await learner.digests()
        assert len(digests[2]) == 2
        assert all(len(set(same)) == 1 for same in digests.values()), digests
        assert digests[1][0] == digests[2][0] != digests[3][0]
        twice = [record.metrics for record in done if record.step == 2]
        assert [metrics["alarm/errors"] for metrics in twice] == [1, 1]
        assert all("train/loss" not in metrics for metrics in twice)
        head = await VersionRegistry(learner.world.bus).head()
        assert head is not None and head.step == 10


async def test_running_baselines_of_roles_outlive_a_restart(open_learner: OpenLearner) -> None:
    """Two ranks are killed between two checkpoints: steps taken twice have the same baselines and bits, and count
    once.
    """

    def respond(task: Task, index: int) -> Sample:
        reward = float(index + task.offset % 3)
        return sample(
            task, index, ((task.min_version, 2 + index),), reward=reward, metadata={"player": task.offset % 2}
        )

    algorithm = {"advantage": "rae", "rae": {"role": "player", "decay": 0.8}}
    changes = {"steps": 9, "checkpoint_every": 3, "data_parallel": 2}
    async with open_learner(staleness={"max_lag": 0}, algorithm=algorithm, **changes) as learner:
        learner.respond = respond
        async with learner.started(steps=5):
            await learner.until(5)
            for rank in learner.ranks:
                rank.kill()
            await learner.ended()
        await learner.finish()
        done = [record for record in await learner.world.records() if isinstance(record, Done)]
        found: dict[int, set[float]] = {}
        for record in done:
            found.setdefault(record.step, set()).add(record.metrics["train/baseline_mean"])
        assert len(done) > 9, "nothing was done twice"
        assert sorted(found) == list(range(1, 10)) and all(len(same) == 1 for same in found.values()), found
        assert len({value for same in found.values() for value in same}) == 9, "the baselines move with every step"
        assert all(len(set(same)) == 1 for same in (await learner.digests()).values())


async def test_a_rank_with_a_bridge_of_ones_own_ends_by_a_hook_that_raises(
    open_learner: OpenLearner, tmp_path: Path
) -> None:
    """The first step of the model that the learner does not know is done and pushed; the hook fails before the
    second.
    """
    write_tiny_pond(tmp_path / "model")
    hooks = {"before_step": f"{megatron_rank_process.__name__}:failing"}
    async with open_learner(bridge="docs.examples.extending.my_bridge:Pond", hooks=hooks) as learner:
        async with learner.started():
            assert await learner.ended() == [1]
            with refusal(
                RankFailed, rank=0, reason=re.compile(r"learner\.hooks\.before_step: .*:failing\b.*\bRuntimeError\b")
            ):
                await learner.feeding
        assert sorted(await learner.digests()) == [1]


async def test_the_step_that_uses_up_the_prompts_is_published_checkpointed_and_exported(
    open_learner: OpenLearner, tmp_path: Path
) -> None:
    """Step 3 of one pass over seven prompts is no multiple of ``push_every`` and of ``checkpoint_every``."""
    async with open_learner(
        data_parallel=2, num_epochs=1, groups_per_step=3, steps=100, checkpoint_every=2, weights={"push_every": 2}
    ) as learner:
        await learner.finish()
        assert sorted(await learner.digests()) == [1, 2, 3]
        head = await VersionRegistry(learner.world.bus).head()
        assert head is not None and head.step == 3
        assert [one.step for one in listed(learner.world.root)] == [3, 2]
        await learner.finish()  # it is over: nothing is trained again
        assert {step: len(digests) for step, digests in (await learner.digests()).items()} == {1: 1, 2: 1, 3: 1}
    final, checkpointed = load_file(tmp_path / "final" / "model.safetensors"), listed(tmp_path / "checkpoints")[0]
    assert final and checkpointed.step == 3


@pytest.mark.parametrize(
    ("max_lag", "push_every", "algorithm"),
    [
        pytest.param(0, 1, {"advantage": "gae"}, id="synchronous-with-a-critic"),
        *rarely([pytest.param(2, 2, {}, id="every-second-step")]),
    ],
)
async def test_a_drained_learner_goes_on_behind_its_last_step(
    open_learner: OpenLearner, tmp_path: Path, max_lag: int, push_every: int, algorithm: dict[str, Any]
) -> None:
    """SIGTERM to one rank of two, twice: both leave after their step, which is in a checkpoint and in ``final``; no
    step is done again.
    """
    settings = {"staleness": {"max_lag": max_lag}, "weights": {"push_every": push_every}, "algorithm": algorithm}
    async with open_learner(data_parallel=2, steps=200, checkpoint_every=50, **settings) as learner:
        last = 0
        for _ in range(2):
            until = last + 2
            async with learner.started():
                await learner.until(until)
                learner.ranks[1].send_signal(signal.SIGTERM)
                assert await learner.ended() == [0, 0]
                await learner.drained()
            last = max(await learner.digests())
            [newest, *_] = listed(learner.world.root)
            assert newest.step == last >= until
            row = await learner.world.bus.rows("run").get(CHECKPOINT_KEY)
            assert row is not None and row[0]["step"] == last
            assert json.loads((tmp_path / "final" / "manifest.json").read_text())["step"] == last
        assert {step: len(done) for step, done in (await learner.digests()).items()} == dict.fromkeys(
            range(1, last + 1), 1
        )


@pytest.mark.parametrize("max_lag", [2, *rarely([0])])
async def test_a_drain_does_not_wait_for_a_push_that_fails(open_learner: OpenLearner, max_lag: int) -> None:
    """No engine takes version 1, which is pushed again and again; the step is in a checkpoint, and the next start
    publishes its weights.
    """
    staleness = {"max_lag": max_lag}
    async with open_learner(
        steps=200, checkpoint_every=50, staleness=staleness, weights={"min_engines": 1, "phase_deadline_s": 1.0}
    ) as learner:
        async with learner.started():
            log = learner.directory / "rank-0.log"
            await until(lambda: "pushing again the weights of step 1" in log.read_text())
            learner.ranks[0].send_signal(signal.SIGTERM)
            assert await learner.ended() == [0]
            await learner.drained()
        last = max(await learner.digests())
        assert listed(learner.world.root)[0].step == last
        head = await VersionRegistry(learner.world.bus).head()
        assert head is not None and head.version == 0
        learner.weights = {}
        async with learner.started():
            await learner.until(last + 1)
            learner.ranks[0].send_signal(signal.SIGTERM)
            assert await learner.ended() == [0]
        assert min((await VersionRegistry(learner.world.bus).steps()).values()) == 0
        assert {len(done) for done in (await learner.digests()).values()} == {1}


async def test_a_learner_that_is_drained_before_its_first_step_has_trained_nothing(
    open_learner: OpenLearner, tmp_path: Path
) -> None:
    async with open_learner() as learner:
        async with learner.started_without_actors():
            async for row in learner.world.bus.rows("weights").watch(HEAD):
                if row is not None:
                    break
            learner.ranks[0].send_signal(signal.SIGTERM)
            assert await learner.ended() == [0]
            await learner.drained()
        assert listed(learner.world.root) == [] and not (tmp_path / "final").exists()
        await learner.finish()
        assert sorted(await learner.digests()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param("qwen3", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        ("qwen3", {"pipeline_parallel": 2}),
        pytest.param("qwen3_moe", {"data_parallel": 2, "expert_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=["tensor_parallel", "pipeline_parallel", "expert_parallel"],
)
async def test_an_engine_lost_in_mid_bucket_holds_up_no_rank(
    open_learner: OpenLearner, tmp_path: Path, family: str, split: dict[str, int]
) -> None:
    """Gathering over the ranks is over before anything is sent: one rank sends, and the other does not wait."""
    write_tiny_model(tmp_path / "model", family, vocab_size=300)
    lost = {
        "killed": Behaviour(fails="kill", at="bucket", once_served=1),
        "stopped": Behaviour(fails="stop", at="bucket", once_served=2),
    }
    weights = {"group": "all", "bucket_bytes": 8_000, "phase_deadline_s": 8.0}
    async with open_learner(**split, steps=8, checkpoint_every=8, weights=weights) as learner:
        here = receivers(learner.world.url, learner.world.run, {"good": Behaviour(), **lost})
        engines = await asyncio.to_thread(here.__enter__)
        try:
            await learner.finish()
            assert sorted(await learner.digests()) == list(range(1, 9))
            head = await VersionRegistry(learner.world.bus).head()
            assert head is not None and head.step == 8
            assert engines["killed"][1].returncode == -signal.SIGKILL
            assert psutil.Process(engines["stopped"][1].pid).status() == psutil.STATUS_STOPPED
            told = await asyncio.to_thread(state, engines["good"][0])
            assert told["ended"] == list(range(1, head.version + 1))
        finally:
            await asyncio.to_thread(here.__exit__, None, None, None)
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert told["digest"] == digest(final)


async def test_a_run_begins_with_the_weights_of_another_ones_checkpoint(
    open_learner: OpenLearner, tmp_path: Path
) -> None:
    """Engines get them before anything is generated: version 0, which they load by themselves, is the model
    directory's.
    """
    async with open_learner(steps=2) as first:
        await first.finish()
        saved = load_file(tmp_path / "final" / "model.safetensors")
        [checkpoint] = listed(first.world.root)
        async with first.followed(steps=3, from_checkpoint=str(checkpoint.path)) as (second, engine):
            bus = second.world.bus
            async with second.started_without_actors():
                async with asyncio.timeout(300):
                    async for row in bus.rows("weights").watch(HEAD):
                        if row is not None and "version" in row[0]:
                            break
                assert (row[0]["version"], row[0]["step"]) == (1, 0)
                assert (await asyncio.to_thread(state, engine))["digest"] == digest(saved)
                async with second.world.actors():
                    assert await second.ended() == [0]
                await second.feeding
            assert await VersionRegistry(bus).steps() == {1: 0, 2: 1, 3: 2, 4: 3}
            assert min([task.min_version async for task in bus.tasks.scan(1)]) == 1
            assert sorted(await second.digests()) == [1, 2, 3]
