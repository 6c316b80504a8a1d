"""The storm's auditor finds violations: streams and checkpoints with one defect each."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests import data_kit
from tests.bus_fixtures import BusOpener
from tests.chaos.auditor import Verdict, judge
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Dead, Done, Plan, Requeue, Settle, Status


class Scene:
    """Three tasks of two samples: one trained, one given up, one incomplete; a checkpoint of the step. Valid until a
    test changes it.
    """

    def __init__(self, bus: Bus, url: str, root: Path) -> None:
        self.bus, self.url, self.root = bus, url, root
        self.plans = [(1, [0], [1, 2])]
        self.settled = [(1, [3, 4], "stale")]
        self.done = [(1, "a"), (1, "a")]
        self.late: list[tuple[int, int]] = []
        self.cursor: tuple[int, int, list[int]] = (1, 4, [])
        """Step, floor, and settled sequences above it."""
        self.witnessed: dict[int, str] = {}
        self.deleted: list[int] = []
        self.requeued: list[int] = []
        """Requeued tasks, by their index here."""
        self.dead: list[int] = []
        """Dead tasks, by their index here."""
        self.trim = 0

    async def judged(self) -> Verdict:
        await self._tell()
        self._checkpoint()
        return await judge(self.url, self.bus.run, self.root, self.witnessed)

    async def _tell(self) -> None:
        await self.bus.tasks.fence(1)
        await self.bus.plans.fence(1)
        tasks = []
        for number in range(3):
            task = replace(data_kit.task(number + 1), run=self.bus.run, epoch=1)
            tasks.append(replace(task, id=await self.bus.tasks.issue(task)))
        for number, index in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), *self.late]:
            attempt = f"a{len(self.witnessed)}"
            one = data_kit.sample(tasks[number], index, attempt=attempt)
            self.witnessed.setdefault(await self.bus.samples.publish(one), one.message_id)
        await self.bus.samples.publish(data_kit.sample(tasks[0], 0, attempt="f", status=Status.FAILED))
        for task, seqs, reason in self.settled:
            await self.bus.plans.append(
                Settle(epoch=1, reason=reason, tasks=_i8([tasks[task].id]), seqs=_i8(seqs), step=1)
            )
        for task in self.dead:
            await self.bus.dead.store(Dead(task=tasks[task].id, reason="it fails", attempts=3, actor="a", prompt=""))
        for task in self.requeued:
            id = tasks[task].id
            await self.bus.plans.append(
                Requeue(epoch=1, task=id, root=id, count=1, prompt_epoch=0, offset=task, step=1)
            )
        for step, members, seqs in self.plans:
            ids = [tasks[one].id for one in members]
            await self.bus.plans.append(_plan(step, ids, seqs))
        for step, digest in self.done:
            await self.bus.plans.append(Done(epoch=1, step=step, metrics={}, weights_digest=digest))
        for seq in self.deleted:
            await self.bus.js.delete_msg(f"TM_{self.bus.run}_SAMPLES", seq)
        if self.trim:
            await self.bus.samples.trim(self.trim)

    def _checkpoint(self) -> None:
        step, floor, settled = self.cursor
        path = self.root / f"step-{step}-epoch-1"
        path.mkdir()
        state = msgpack.packb({"schema": 1, "step": step, "samples": {"floor": floor, "settled": settled}})
        (path / "state.msgpack").write_bytes(state)
        files = {"state.msgpack": {"size": len(state), "sha256": hashlib.sha256(state).hexdigest()}}
        (path / "manifest.json").write_text(json.dumps({"schema": 1, "extra": {}, "files": files}))


def _i8(values: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, np.int64)


def _plan(step: int, tasks: list[int], seqs: list[int]) -> Plan:
    zeros = np.zeros(len(seqs), np.int32)
    return Plan(
        epoch=1,
        step=step,
        tasks=_i8(tasks),
        seqs=_i8(seqs),
        group_sizes=np.full(len(tasks), len(seqs) // len(tasks), np.int32),
        ranks=zeros,
        micro_batches=zeros,
        version_steps={0: 0},
        oldest_step=None,
        data_parallel=1,
        num_micro_batches=1,
        config_digest="",
        chain="",
    )


async def test_a_sound_run(open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path) -> None:
    async with open_bus() as bus:
        scene = Scene(bus, nats_server.url, tmp_path)
        scene.late = [(0, 1), (1, 0)]
        verdict = await scene.judged()
    assert (verdict.lost, verdict.twice, verdict.wrong) == ([], [], [])
    assert (verdict.steps, verdict.steps_done, verdict.steps_taken_again, verdict.trained) == (1, 1, 1, 2)
    assert verdict.dropped == {"stale": 3, "failed": 1}
    assert (verdict.duplicates, verdict.to_come, verdict.trimmed) == (1, 1, 0)


async def test_a_dead_task_is_trained_with_what_it_has(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The second sample of the task is the first of its group; the first one came too late."""
    async with open_bus() as bus:
        scene = Scene(bus, nats_server.url, tmp_path)
        scene.plans, scene.dead = [(1, [0], [2])], [0]
        verdict = await scene.judged()
    assert (verdict.lost, verdict.twice, verdict.wrong, verdict.duplicates) == ([], [], [], 1)


def _short(scene: Scene) -> None:
    scene.plans = [(1, [0], [2])]


def _cut_short(scene: Scene) -> None:
    scene.plans = [(1, [0], [1])]


def _seen_and_gone(scene: Scene) -> None:
    scene.witnessed[99] = "9.0.z"


def _replaced(scene: Scene) -> None:
    scene.witnessed[5] = "3.0.another"


def _hole(scene: Scene) -> None:
    scene.deleted = [2]


def _forgotten(scene: Scene) -> None:
    scene.cursor = (1, 5, [])


def _trimmed_early(scene: Scene) -> None:
    scene.trim, scene.cursor = 5, (1, 2, [3])


def _trimmed_unknown(scene: Scene) -> None:
    scene.settled, scene.trim = [], 5


def _left_out(scene: Scene) -> None:
    scene.plans = [(1, [0], [1, 6])]


def _again(scene: Scene) -> None:
    scene.plans = [(1, [0], [1, 2]), (2, [0], [1, 2])]


def _both(scene: Scene) -> None:
    scene.late, scene.plans = [(0, 0), (0, 1)], [(1, [0], [1, 2]), (2, [0], [6, 7])]


def _dropped_and_trained(scene: Scene) -> None:
    scene.settled = [(0, [1, 2], "stale"), (1, [3, 4], "stale")]


def _to_be_trained_again(scene: Scene) -> None:
    scene.cursor = (1, 1, [3, 4])


def _skipped(scene: Scene) -> None:
    scene.cursor = (0, 4, [])


def _asked_for_twice(scene: Scene) -> None:
    scene.settled, scene.requeued = [(1, [3, 4], "dead")], [1, 1]


def _asked_for_alive(scene: Scene) -> None:
    scene.requeued = [1]


def _other_bits(scene: Scene) -> None:
    scene.done = [(1, "a"), (1, "b")]


def _no_reason(scene: Scene) -> None:
    scene.settled = [(1, [3, 4], "whim")]


def _gap_in_steps(scene: Scene) -> None:
    scene.plans = [(2, [0], [1, 2])]


@pytest.mark.parametrize(
    ("damage", "where", "said"),
    [
        (_seen_and_gone, "lost", "99 (9.0.z) was seen in the stream and is not there"),
        (_replaced, "lost", "5 was 3.0.another and is"),
        (_hole, "lost", "was seen in the stream and is not there"),
        (_forgotten, "lost", "sample 5 (4, 0) is behind the cursor, and no record names it"),
        (_trimmed_early, "lost", "sample 4 was trimmed, and the checkpoint's cursor is not past it"),
        (_trimmed_unknown, "lost", "was trimmed, and no record knows its place"),
        (_left_out, "wrong", "its step has it as"),
        (_cut_short, "wrong", "task 2 is not dead, and was trained with 1 of 2 samples"),
        (_short, "wrong", "sample 2 is (2, 1), and its step has it as (2, 0)"),
        (_again, "twice", "sample 1 is in step 2 and was settled before"),
        (_both, "twice", "samples 1 and 6 are both trained as (2, 0)"),
        (_dropped_and_trained, "twice", "sample 1 is in step 1 and was settled before"),
        (
            _to_be_trained_again,
            "twice",
            "sample 2 is in step 1, in the model of the checkpoint, and not behind its cursor",
        ),
        (_skipped, "lost", "sample 1 is in step 1, not in the model of the checkpoint, and behind its cursor"),
        (_asked_for_twice, "wrong", "is asked for again, and is not dead or has been before"),
        (_asked_for_alive, "wrong", "is asked for again, and is not dead or has been before"),
        (_other_bits, "wrong", "step 1 was taken again and gave other weights"),
        (_no_reason, "wrong", "reason 'whim' is none"),
        (_gap_in_steps, "wrong", "step 2 is planned behind step 0"),
    ],
)
async def test_each_defect_is_seen(
    open_bus: BusOpener,
    nats_server: EmbeddedServer,
    tmp_path: Path,
    damage: Callable[[Scene], None],
    where: str,
    said: str,
) -> None:
    async with open_bus() as bus:
        scene = Scene(bus, nats_server.url, tmp_path)
        damage(scene)
        verdict = await scene.judged()
    assert any(said in text for text in getattr(verdict, where)), verdict
