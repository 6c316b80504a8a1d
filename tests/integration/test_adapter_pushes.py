"""Adapters pushed by a real publisher to real engines on a real bus: what each engine receives, serves and reports;
engines that join late, restart, hold other weights, or take merged weights alone.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.adapters import adapter, settings, weights_of, with_adapter
from tests.integration.test_weightstore_peer_snapshots import engine, rows, until
from tests.integration.test_weightstore_publisher import DEADLINE_S, GOOD, receivers, state
from tests.receiver_app import digest
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.adapters import MergedTensors
from tidemill.weightstore.format.checksums import differences, sum_of
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushReport
from tidemill.weightstore.transport.parts import Division

PROMPT = list(range(5, 45))


@contextmanager
def publishing(
    bus: str, run: str, directory: Path, model_dir: Path, *, epoch: int = 1, **config: Any
) -> Iterator[Publisher]:
    base = weights_of(model_dir)
    publisher = Publisher(
        WeightsConfig(**{"phase_deadline_s": DEADLINE_S, "bucket_bytes": 16_000, **config}),
        bus_url=bus,
        run=run,
        epoch=epoch,
        directory=directory,
        model_dir=model_dir,
        division=Division(Manifest.of(base.items())),
        adapters=settings(),
    )
    try:
        publisher.start()
        publisher.stage_base(base.items())
        yield publisher
    finally:
        publisher.close(drain=False)


async def push(publisher: Publisher, step: int, base: Mapping[str, Tensor]) -> PushReport:
    """Push the adapter of a step."""
    handle = await asyncio.to_thread(lambda: publisher.publish(step, adapter(base, step).items(), wait=False))
    return await asyncio.to_thread(handle.result, LIMIT_S)


def merged(base: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    return dict(MergedTensors(base, adapter(base, step), settings().scale))


async def until_serving(bus: str, run: str, name: str, version: int) -> None:
    """Wait until an engine serves a version."""

    async def reached() -> bool:
        row = (await rows(bus, run)).get(name)
        return row is not None and (row.phase, row.version) == ("serving", version)

    await until(reached)


async def same(served: BuiltinEngine, want: Mapping[str, Tensor]) -> bool:
    """Return whether the weights that an engine reports are these."""
    _, report = await served.updates.checksum_report(of="served")
    return differences(report, want, lambda part: sum_of("sum64", part, want)) == []


async def generate(served: BuiltinEngine) -> dict[str, Any]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{served.url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def assert_exact(served: BuiltinEngine, base: Mapping[str, Tensor], step: int, model_dir: Path) -> None:
    """The log-probs of a response are those of transformers with the merged weights."""
    answer = await generate(served)
    merged_weights = with_adapter(base, adapter(base, step), settings().scale)
    want = await asyncio.to_thread(log_probs, model_dir, merged_weights, torch.tensor(PROMPT + answer["output_ids"]))
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(got, want[len(PROMPT) - 1 :], atol=1e-5, rtol=1e-5)
    assert answer["meta_info"]["weight_version"] == str(served.version)


@torch.no_grad()
def log_probs(model_dir: Path, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Return transformers' log-probs of the tokens behind the first."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    return model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("transport", ["broadcast", "handles"])
async def test_engines_receive_the_adapter_alone_and_others_merged_weights(
    bus_url: str,
    run_id: str,
    tmp_path: Path,
    transport: str,
) -> None:
    """A mixed fleet: one engine adds adapters by itself, the other takes weights. Both serve the same version."""
    model_dir = write_tiny_model(tmp_path / "model")
    base = weights_of(model_dir)
    with receivers(bus_url, run_id, {"whole": GOOD}) as processes:
        with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir, transport=transport) as publisher:
            await asyncio.to_thread(publisher.publish_initial, model_dir)
            async with engine(bus_url, run_id, model_dir, "adds") as adds:
                await until_serving(bus_url, run_id, "adds", 0)
                for step in (1, 2):
                    report = await push(publisher, step, base)
                    assert (report.version, report.engines, report.evicted) == (step, ("adds", "whole"), {})
                    assert report.adapter_engines == ("adds",)
                    assert report.verified == (("adds", "whole") if step == 1 else ())
                    told = await asyncio.to_thread(state, processes["whole"][0])
                    assert (told["version"], told["digest"]) == (step, digest(merged(base, step)))
                    assert adds[0].version == step and await same(adds[0], merged(base, step))
                    await assert_exact(adds[0], base, step, model_dir)
                assert adds[0].updates.standby is None, "an adapter needs no second copy of the weights"


async def test_an_adapter_has_a_part_of_the_bytes(bus_url: str, run_id: str, tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    base = weights_of(model_dir)
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        async with engine(bus_url, run_id, model_dir, "adds"):
            await until_serving(bus_url, run_id, "adds", 0)
            report = await push(publisher, 1, base)
    assert report.num_bytes == sum(tensor.numel() * 4 for tensor in adapter(base, 1).values())


async def test_an_engine_that_joins_late_and_one_that_restarts_load_the_adapter_of_the_head(
    bus_url: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    model_dir, snapshots = write_tiny_model(tmp_path / "model"), tmp_path / "snapshots"
    base = weights_of(model_dir)
    with publishing(bus_url, run_id, snapshots, model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        for step in (1, 2, 3):
            await push(publisher, step, base)
        assert sorted(path.name for path in snapshots.iterdir()) == ["v2-adapter", "v3-adapter"]
        for start in range(2):
            async with engine(bus_url, run_id, model_dir, "late") as late:
                await until_serving(bus_url, run_id, "late", 3 + start)
                assert await same(late[0], merged(base, 3 + start))
                await assert_exact(late[0], base, 3 + start, model_dir)
                report = await push(publisher, 4 + start, base)
                assert (report.engines, report.adapter_engines) == (("late",), ("late",)), "its base is known"
        assert not (snapshots / "v3").exists(), "no snapshot of all weights was needed"


async def test_an_engine_with_other_weights_gets_the_base_once(
    bus_url: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    """It cannot add the head's adapter, so it loads merged weights; the next push has the base as well."""
    model_dir, other_dir = write_tiny_model(tmp_path / "model"), write_tiny_model(tmp_path / "other", seed=5)
    base = weights_of(model_dir)
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        await push(publisher, 1, base)
        async with engine(bus_url, run_id, other_dir, "other") as other:
            await until_serving(bus_url, run_id, "other", 1)
            assert await same(other[0], merged(base, 1)), "merged weights, by a snapshot"
            for step, has_adapter_alone in ((2, False), (3, True), (4, True)):
                report = await push(publisher, step, base)
                assert report.engines == ("other",), report.evicted
                assert report.adapter_engines == (("other",) if has_adapter_alone else ())
                assert await same(other[0], merged(base, step))
                await assert_exact(other[0], base, step, model_dir)
            # A peer that joins while the adapter's snapshot is gone gets merged weights from this engine.
            for path in (tmp_path / "snapshots").glob("*-adapter"):
                for file in path.iterdir():
                    file.unlink()
            async with engine(bus_url, run_id, model_dir, "peer") as peer:
                await until_serving(bus_url, run_id, "peer", 4)
                assert await same(peer[0], merged(base, 4))


async def test_a_next_learner_pushes_adapters_on(bus_url: str, run_id: str, tmp_path: Path) -> None:
    model_dir, snapshots = write_tiny_model(tmp_path / "model"), tmp_path / "snapshots"
    base = weights_of(model_dir)
    async with engine(bus_url, run_id, model_dir, "adds") as adds:
        for epoch in (1, 2):
            with publishing(bus_url, run_id, snapshots, model_dir, epoch=epoch) as publisher:
                await asyncio.to_thread(publisher.publish_initial, model_dir)
                await until_serving(bus_url, run_id, "adds", epoch - 1)
                report = await push(publisher, epoch, base)
                assert (report.version, report.engines, report.adapter_engines) == (epoch, ("adds",), ("adds",))
                assert await same(adds[0], merged(base, epoch))
                assert [path.name for path in snapshots.iterdir()] == [f"v{epoch}-adapter"]


@asynccontextmanager
async def opened(bus: str, run: str, model_dir: Path) -> AsyncIterator[BuiltinEngine]:
    async with engine(bus, run, model_dir, "adds") as adds:
        await until_serving(bus, run, "adds", 0)
        yield adds[0]


async def test_an_adapter_of_other_weights_is_refused(
    bus_url: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    """The engine goes on with the weights before; the learner sends the base when it has been refused."""
    model_dir = write_tiny_model(tmp_path / "model")
    base = weights_of(model_dir)
    with publishing(bus_url, run_id, tmp_path / "snapshots", model_dir) as publisher:
        await asyncio.to_thread(publisher.publish_initial, model_dir)
        async with opened(bus_url, run_id, model_dir) as adds:
            await push(publisher, 1, base)
            await adds.load_snapshot(write_tiny_model(tmp_path / "other", seed=5), 1)
            report = await push(publisher, 2, base)
            assert report.engines == () and "adapter: want one of the weights" in report.evicted["adds"]
            await until_serving(bus_url, run_id, "adds", 2)
            report = await push(publisher, 3, base)
            assert (report.engines, report.adapter_engines) == (("adds",), ())
            assert await same(adds, merged(base, 3))
