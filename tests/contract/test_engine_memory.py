"""Memory that a colocated engine releases and resumes, in every order: really freed, nothing aborted, nothing torn
served.
"""

import asyncio
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_push import flat, joined
from tests.engine_serving import Gate, Served, greedy, prompts, serving
from tests.skips import inapplicable
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S, until, until_gone
from tidemill.actors.serving.builtin.transformers_cache import PagedLayer

CONTEXT, LONG, LATE = 4096, 240, 100
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen3") / "0", "qwen3", seed=0, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [tiny_model("qwen3", seed=seed, max_position_embeddings=CONTEXT) for seed in range(2)]


def storages(served: Served) -> dict[str, set[tuple[int, int]]]:
    """Return address and bytes of the storages of weights, and of keys and values."""
    updates, scheduler = served.engine.updates, served.engine.scheduler
    weights = [each for each in (updates.weights, updates.standby) if each is not None]
    return {
        "weights": {place(tensor) for each in weights for tensor in each.named.values()},
        "kv_cache": {place(tensor) for layer in scheduler.runner.memory.layers for tensor in tensors_of(layer)},
    }


def tensors_of(layer: Any) -> Iterable[torch.Tensor]:
    """Return the tensors of a layer's keys and values, of either model runner."""
    return layer.parts.values() if isinstance(layer, PagedLayer) else layer


def place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


async def alive(among: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return those of the storages that any tensor of this process still refers to."""

    def look() -> set[tuple[int, int]]:
        gc.collect()
        return among & {place(each) for each in gc.get_objects() if type(each) is torch.Tensor}

    return await asyncio.to_thread(look)  # the collection takes seconds if much was loaded before


async def ask(served: Served, path: str, *tags: str) -> int:
    return (await served.post(path, {"tags": list(tags) or None}))[0]


async def running(served: Served, count: int, params: dict[str, Any]) -> tuple[Gate, list["asyncio.Task[Any]"]]:
    """Start requests and return them while they are being decoded, held some tokens in, and the gate that holds
    them.
    """
    gate = served.hold(after=10)
    tasks = [asyncio.create_task(served.generate(prompt, **params)) for prompt in prompts(count)]
    await served.until(lambda: len(served.engine.scheduler.running) == count)
    return gate, tasks


async def test_a_whole_cycle_frees_the_memory_and_every_request_goes_on(directory: Path, models: list[Any]) -> None:
    params = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}
    async with serving(directory) as served, joined(served, epoch=1) as push:
        before = storages(served)
        assert before["weights"] == await alive(before["weights"]) and before["weights"]
        gate, tasks = await running(served, 4, params)
        assert await ask(served, RELEASE) == 400, "while requests are decoded, without a pause"
        assert served.engine.scheduler.running, "a refusal changes nothing"
        await served.client.pause("in_place")
        gate.open()
        before["kv_cache"] = storages(served)["kv_cache"]
        assert before["kv_cache"] == await alive(before["kv_cache"]) and before["kv_cache"]
        await served.client.pause("retract")
        for _ in range(2):  # both verbs may be repeated
            assert await ask(served, RELEASE, "kv_cache") == 200
            assert await ask(served, RELEASE, "weights", "kv_cache") == 200
        assert storages(served) == {"weights": set(), "kv_cache": set()}
        await until_gone(lambda: alive(before["weights"] | before["kv_cache"]))
        tokens = served.engine.scheduler.counters.tokens_generated
        late = asyncio.create_task(served.generate(prompts(1)[0], **params | {"max_new_tokens": LATE}))
        await served.until(lambda: len(served.engine.scheduler.waiting) == 5)
        assert (await push.begin(1))[0] == 400, "there is no memory to receive into"
        assert (await served.get("/health_generate"))[0] == 503
        assert (await served.post("/weights_checker", {"action": "checksum"}))[0] == 400
        for _ in range(2):
            assert await ask(served, RESUME, "weights") == 200
        await served.client.resume()  # of no use while the keys and values are missing
        await push.whole(models[1], 1)
        assert not any(task.done() for task in [*tasks, late])
        assert served.engine.scheduler.counters.tokens_generated == tokens, (
            "nothing is generated between release and resume"
        )
        assert await ask(served, RESUME, "kv_cache") == 200
        for task in [*tasks, late]:
            answer = await task
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
            assert len(answer["output_ids"]) == (LATE if task is late else LONG)
        for task in tasks:
            spans = task.result()["meta_info"]["weight_versions"]
            assert [span["version"] for span in spans] == ["0", "1"] and task.result()["meta_info"][
                "num_retractions"
            ] == 1
        assert late.result()["output_ids"] == await greedy(models[1], prompts(1)[0], LATE)
        assert served.engine.stats()["requests_aborted"] == 0
        assert len(storages(served)["weights"]) == len(before["weights"]), "one copy of the weights, not two"
        await push.whole(models[0], 2)
        both = storages(served)["weights"]
        assert len(both) == 2 * len(before["weights"]), "without a release in between there is a standby copy"
        assert await ask(served, RELEASE, "weights") == 200
        await until_gone(lambda: alive(both))


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
async def test_nothing_is_generated_before_a_whole_update_in_any_order_of_resuming(
    order: tuple[str, str], directory: Path, models: list[Any]
) -> None:
    async with serving(directory) as served, joined(served) as push:
        assert await ask(served, RELEASE) == 200, "idle: no pause needed"
        waiting = asyncio.create_task(served.generate(prompts(1)[0], max_new_tokens=5, temperature=0))
        for tag in order:
            assert await ask(served, RESUME, tag) == 200
        await served.until(lambda: len(served.engine.scheduler.waiting) == 1)
        assert not served.engine.whole
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(list(models[1].named_parameters())[:3]))[0] == 200
        assert (await push.end(1))[0] == 400, "a part is not served"
        assert not served.engine.whole and served.engine.version == 0 and not waiting.done()
        await push.whole(models[1], 1)
        assert (await waiting)["output_ids"] == await greedy(models[1], prompts(1)[0], 5)


async def test_a_release_discards_an_open_update(directory: Path, models: list[Any]) -> None:
    async with serving(directory) as served, joined(served) as push:
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(list(models[1].named_parameters())[:3]))[0] == 200
        assert await ask(served, RELEASE, "weights") == 200
        assert await ask(served, RESUME, "weights") == 200
        assert (await push.end(1))[0] == 400
        assert (await push.bucket(list(models[1].named_parameters())[3:], send=False))[0] == 400, (
            "what came before is gone"
        )
        await push.whole(models[1], 1)
        answer = await served.generate(prompts(1)[0], max_new_tokens=5, temperature=0)
        assert answer["output_ids"] == await greedy(models[1], prompts(1)[0], 5)


async def test_keys_and_values_alone_can_go_while_the_weights_stay(directory: Path, models: list[Any]) -> None:
    params = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}
    async with serving(directory) as served:
        wanted = [(await served.generate(prompt, **params))["output_ids"] for prompt in prompts(2)]
        gate, tasks = await running(served, 2, params)
        await served.client.pause("in_place")
        gate.open()
        before = storages(served)
        assert await ask(served, RELEASE, "kv_cache") == 200
        await until_gone(lambda: alive(before["kv_cache"]))
        assert before["weights"] == await alive(before["weights"]) and served.engine.whole
        assert len(served.engine.scheduler.waiting) == 2, "rows that were kept in place cannot be without their keys"
        assert await ask(served, RESUME) == 200
        assert [(await task)["output_ids"] for task in tasks] == wanted
        for tokens, prompt in zip(wanted, prompts(2), strict=True):
            assert tokens[:200] == await greedy(models[0], prompt, 200)


async def test_a_pause_without_a_release_ends_with_the_keys_and_values(directory: Path) -> None:
    """The learner has requested both, and only the pause arrived."""
    async with serving(directory) as served:
        await served.client.pause("retract")
        assert await ask(served, RESUME, "weights") == 200
        assert served.engine.scheduler.paused
        assert await ask(served, RESUME, "kv_cache") == 200
        assert not served.engine.scheduler.paused


async def test_an_engine_takes_a_directory_by_itself_and_serves(directory: Path, models: list[Any]) -> None:
    async with serving(directory) as served:
        assert await ask(served, RELEASE) == 200
        status, _ = await served.post(
            "/update_weights_from_disk", {"model_path": str(directory), "weight_version": "0"}
        )
        assert status == 400, "a client must resume first"
        await served.engine.load_snapshot(directory, 0)
        answer = await served.generate(prompts(1)[0], max_new_tokens=5, temperature=0)
        assert answer["output_ids"] == await greedy(models[0], prompts(1)[0], 5)


async def test_a_release_while_it_takes_a_directory_by_itself_comes_behind_it(directory: Path) -> None:
    async with serving(directory) as served:
        updates = served.engine.updates
        assert await ask(served, RELEASE) == 200
        load = asyncio.create_task(served.engine.load_snapshot(directory, 5))
        await until(lambda: updates.writing.locked(), every_s=0)  # it sets no event
        release = asyncio.create_task(updates.run_shielded(updates.release(frozenset({"weights", "kv_cache"}))))
        await asyncio.gather(load, release)
        assert served.engine.version == 5
        assert served.engine.scheduler.released == {"weights", "kv_cache"}
        assert storages(served) == {"weights": set(), "kv_cache": set()}


async def test_what_is_not_understood_is_refused(directory: Path) -> None:
    async with serving(directory) as served:
        for tags in (["weights", "graphs"], "weights", [], [1]):
            for path in (RELEASE, RESUME):
                assert (await served.post(path, {"tags": tags}))[0] == 400, tags
        assert (await served.post("/begin_weight_update", {"weight_version": "1", "epoch": 5}))[0] == 200
        assert (await served.post(RELEASE, {"tags": None, "epoch": 4}))[0] == 409
        assert served.engine.whole


async def test_a_bucket_that_is_late_keeps_no_push_after_the_release_from_being_served(
    directory: Path, models: list[Any]
) -> None:
    """The bucket was on its way into memory that has been released and is not used again."""
    async with serving(directory) as served, joined(served) as old:
        if served.engine.updates.weights.adapter_shape is None:
            inapplicable("the runner over transformers receives no bucket directly into its tensors")
        for version in (1, 2, 3):  # from then on buckets are received directly into their tensors
            await old.whole(models[0], version)
        await old.begin(4)
        asked = asyncio.create_task(old.bucket(list(models[0].named_parameters()), send=False))
        await served.until(lambda: bool(served.engine.updates._standby.in_transit))
        assert await ask(served, RELEASE) == 200
        assert await ask(served, RESUME) == 200
        async with joined(served, "new") as push:
            await push.whole(models[1], 5)
            (prompt,) = prompts(1)
            made = await served.generate(prompt, temperature=0, max_new_tokens=8)
        assert made["output_ids"] == await greedy(models[1], prompt, 8)
        await asyncio.to_thread(old.group.send, flat(models[0].named_parameters()), LIMIT_S)
        assert (await asked)[0] == 400
