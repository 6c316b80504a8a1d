"""New weights for an engine that decodes: flips between tokens, spans, discarded standby copies, epochs. Real HTTP,
gloo and handles.
"""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_push import flat, joined, named, serves
from tests.engine_serving import greedy, log_probs_of, prompts, scores, scores_across, serving, told_log_probs
from tests.examples import rarely
from tests.handle_push import joined_by_handles
from tests.tiny_models import SERVED, named_weights, tiny_model, write_tiny_model
from tests.waits import LIMIT_S, turn
from tidemill.actors.errors import UpdateRefused
from tidemill.actors.serving.authority import Authority
from tidemill.bus.wire.messages import Sampling

CONTEXT = 4096
over_both = pytest.mark.parametrize("joined", [joined, joined_by_handles], ids=["broadcast", "handles"])


@pytest.fixture(
    scope="module",
    params=["qwen2", "qwen3_moe", *rarely(family for family in SERVED if family not in ("qwen2", "qwen3_moe"))],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(family: str) -> list[Any]:
    """Return the models of versions 0 to 3."""
    return [tiny_model(family, seed=seed, tied=family == "qwen2", max_position_embeddings=CONTEXT) for seed in range(4)]


@pytest.fixture(scope="module")
def directories(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp(family)
    return [
        write_tiny_model(root / str(seed), family, seed=seed, tied=family == "qwen2", max_position_embeddings=CONTEXT)
        for seed in range(4)
    ]


async def test_a_push_under_way_comes_before_what_the_engine_fetches_itself(
    directories: list[Path], models: list[Any]
) -> None:
    """Otherwise each would discard the other, and the learner evict the engine."""
    async with serving(directories[0]) as served, joined(served) as push:
        await push.begin(2)
        catching_up = asyncio.create_task(served.engine.load_snapshot(directories[1], 1))
        await turn(10)  # it finds the open push, and waits
        await push.bucket(named_weights(models[2]))
        await push.end(2)
        assert (await catching_up, served.engine.version) == (0.0, 2)
        await push.begin(3)
        catching_up = asyncio.create_task(served.engine.load_snapshot(directories[1], 4))
        await turn(10)  # it finds the open push, and waits
        await push.bucket(named_weights(models[3]))
        await push.end(3)
        await catching_up
        assert served.engine.version == 4


async def test_a_push_that_begins_while_a_load_waits_is_not_discarded(
    directories: list[Path], models: list[Any]
) -> None:
    async with serving(directories[0]) as served, joined(served) as push:
        updates = served.engine.updates
        async with updates.writing:
            catching_up = asyncio.create_task(served.engine.load_snapshot(directories[1], 1))
            await turn(10)  # it finds no open push, and waits
            begins = asyncio.create_task(push.begin(2))
            await served.until(lambda: updates.begun == 1)
        assert (await begins)[0] == 200
        assert (await push.bucket(named_weights(models[2])))[0] == 200
        assert (await push.end(2))[0] == 200
        assert (await catching_up, served.engine.version) == (0.0, 2)


async def test_what_an_engine_fetches_itself_comes_behind_a_flip_that_the_decoder_is_late_with(
    directories: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(directories[0]) as served, joined(served) as push:
        flip = served.engine.scheduler.flip
        with ThreadPoolExecutor(1) as late:

            def flip_late(*args: Any) -> Any:
                return late.submit(lambda: (time.sleep(0.3), flip(*args).result())[1])

            monkeypatch.setattr(served.engine.scheduler, "flip", flip_late)
            await push.begin(2)
            catching_up = asyncio.create_task(served.engine.load_snapshot(directories[1], 1))
            await push.bucket(named_weights(models[2]))
            await push.end(2)
            assert (await catching_up, served.engine.version) == (0.0, 2)


async def test_what_its_sender_leaves_open_is_discarded_by_handles_too(
    directories: list[Path], models: list[Any]
) -> None:
    async with serving(directories[0]) as served:
        async with joined_by_handles(served) as push:
            for version in (1, 2):
                await push.ask("join", pid=os.getpid())
                await push.begin(version)
                assert (await push.bucket(named_weights(models[version])))[0] == 200
                assert (await push.ask("leave"))[0] == 200
                async with asyncio.timeout(LIMIT_S):
                    await served.engine.load_snapshot(directories[version], version)
                assert served.engine.version == version
            learner = await asyncio.create_subprocess_exec("sleep", "60")
            await push.ask("join", pid=learner.pid)
            await push.begin(3)
            assert served.engine.updates.open_update is not None
            learner.kill()
            await learner.wait()
            async with asyncio.timeout(LIMIT_S):
                await served.engine.load_snapshot(directories[3], 3)


@over_both
async def test_after_a_push_the_engine_is_the_new_model(
    directories: list[Path], models: list[Any], joined: Any
) -> None:
    given = prompts(6)
    async with serving(directories[0]) as served, joined(served, epoch=3) as push:
        before = (await served.post("/weights_checker", {"action": "checksum"}))[1]
        for version in (1, 2):
            answer = await push.whole(models[version], version)
            assert answer["stall_s"] >= 0
            batch = await served.together([(prompt, {"temperature": 0, "max_new_tokens": 12}) for prompt in given])
            for prompt, told in zip(given, batch, strict=True):
                assert told["output_ids"] == await greedy(models[version], prompt, 12)
                assert told["meta_info"]["weight_versions"] == [
                    {"version": str(version), "start": 0, "end": len(told["output_ids"])}
                ]
                want = log_probs_of(await scores(models[version], prompt, told["output_ids"]), told["output_ids"])
                np.testing.assert_allclose(told_log_probs(told), want, atol=1e-4)
        assert (await served.get("/model_info"))[1]["weight_version"] == "2"
        assert served.engine.epoch == 3
        after = (await served.post("/weights_checker", {"action": "checksum"}))[1]
        assert after["success"]
        differing = [
            name
            for name, digest in after["ranks"][0]["checksums"].items()
            if before["ranks"][0]["checksums"][name] != digest
        ]
        assert differing == list(before["ranks"][0]["checksums"])
    async with serving(directories[2]) as served:
        assert (await served.post("/weights_checker", {"action": "checksum"}))[1]["ranks"] == after["ranks"]


@over_both
async def test_a_flip_in_the_middle_of_responses_keeps_them_going(
    directories: list[Path], models: list[Any], joined: Any
) -> None:
    """Three flips during a batch: every log-prob is that of the version its span names, on keys and values that are
    kept.
    """
    given, params = prompts(4, seed=2), {"max_new_tokens": 600, "ignore_eos": True, "temperature": 1.3}
    async with serving(directories[0]) as served, joined(served) as push:
        gate = served.hold(after=0)
        await served.client.pause()
        tasks = [
            asyncio.create_task(served.generate(prompt, sampling_seed=index, **params))
            for index, prompt in enumerate(given)
        ]
        await served.until(lambda: len(served.engine.scheduler.waiting) == 4)
        await served.client.resume()
        for version in (1, 2, 3):
            goal = served.engine.scheduler.counters.steps + 20
            gate.let(20)
            await served.until(lambda goal=goal: served.engine.scheduler.counters.steps >= goal)
            await push.whole(models[version], version)
        gate.open()
        for prompt, answer in zip(given, await asyncio.gather(*tasks), strict=True):
            spans, ids = answer["meta_info"]["weight_versions"], answer["output_ids"]
            assert [span["version"] for span in spans] == ["0", "1", "2", "3"]
            assert [spans[0]["start"], *(span["end"] for span in spans)] == [
                0,
                *(span["start"] for span in spans[1:]),
                len(ids),
            ]
            assert answer["meta_info"]["weight_version"] == "3"
            told = [(models[int(span["version"])], span["end"] - span["start"]) for span in spans]
            want = (await scores_across(told, prompt, ids) / params["temperature"]).log_softmax(-1)
            chosen = want.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(told_log_probs(answer), chosen, atol=1e-4)
        assert served.engine.stats()["requests_aborted"] == 0


@over_both
async def test_decoding_goes_on_during_a_push_and_nothing_is_aborted(
    directories: list[Path], models: list[Any], joined: Any
) -> None:
    async with serving(directories[0]) as served, joined(served) as push:
        gate = served.hold(after=10)
        states = served.client.stream(
            [5, 6, 7], Sampling(max_new_tokens=4000, stop_token_ids=(), seed=1, temperature=0.0)
        )
        task = asyncio.create_task(served.generate([5, 6], max_new_tokens=4000, ignore_eos=True))
        await anext(states)
        await states.aclose()
        tensors = list(named(models[1]))
        await push.begin(1)
        await push.bucket(tensors[:3])
        steps = served.engine.scheduler.counters.steps
        gate.let(20)
        await served.until(
            lambda: served.engine.scheduler.counters.steps > steps + 3
        )  # the standby copy is half full, and it decodes
        assert served.engine.version == 0
        await push.bucket(tensors[3:])
        await push.end(1)
        steps = served.engine.scheduler.counters.steps
        gate.let(20)
        await served.until(lambda: served.engine.scheduler.counters.steps > steps + 3)
        assert not task.done()
        await served.client.abort()
        answer = await task
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["0", "1"]


async def test_a_prompt_read_under_old_weights_is_not_shared_under_new_ones(
    directories: list[Path], models: list[Any]
) -> None:
    prompt = prompts(1, low=20)[0]
    async with serving(directories[0]) as served:
        gate = served.hold(after=0)
        task = asyncio.create_task(served.generate(prompt, max_new_tokens=3000, ignore_eos=True))
        await served.until(lambda: len(served.engine.scheduler.running) == 1)
        await served.engine.load_snapshot(directories[1], 1)
        asking = asyncio.create_task(served.generate(prompt, temperature=0, max_new_tokens=8))
        await served.until(lambda: len(served.engine.scheduler.running) == 2)
        gate.let(20)
        answer = await asking
        assert answer["meta_info"]["cached_tokens"] == 0
        assert answer["output_ids"] == await greedy(models[1], prompt, 8)
        await served.client.abort()
        await task


async def test_weights_come_from_a_directory_whole_or_not_at_all(
    directories: list[Path], models: list[Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    (prompt,) = prompts(1)
    async with serving(directories[0], phase="stale") as served:
        body = {"model_path": str(directories[1]), "weight_version": "5", "epoch": 2}
        status, answer = await served.post("/update_weights_from_disk", body)
        assert (status, answer["success"]) == (200, True)
        assert (served.engine.version, served.engine.epoch, served.engine.phase) == (5, 2, "serving")
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
        tensors = load_file(directories[2] / "model.safetensors")
        dropped = tensors.pop("model.norm.weight")
        for wrong, why in (
            ({}, "are missing"),
            ({"model.norm.weight": dropped[:-1]}, "want shape"),
            ({"more": dropped}, "no tensor of this"),
        ):
            save_file(tensors | wrong, tmp_path / "model.safetensors")
            status, answer = await served.post(
                "/update_weights_from_disk", body | {"model_path": str(tmp_path), "weight_version": "6"}
            )
            assert (status, answer["success"], why in answer["message"]) == (400, False, True), answer
        status, answer = await served.post(
            "/update_weights_from_disk", body | {"model_path": str(tmp_path / "nowhere")}
        )
        assert status == 400
        status, answer = await served.post("/update_weights_from_disk", body | {"weight_version": "4"})
        assert (status, "want >= 5" in answer["message"]) == (400, True)
        assert (served.engine.version, served.engine.epoch) == (5, 2)
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )


async def test_torn_weights_are_impossible(directories: list[Path], models: list[Any]) -> None:
    (prompt,) = prompts(1)
    tensors = list(named(models[1]))
    # Without shared blocks an answer has the same bits again.
    async with serving(directories[0], share_prefix=False) as served, joined(served) as push:
        want = await served.generate(prompt, temperature=0, max_new_tokens=8)

        async def refused(answer: tuple[int, Any], why: str) -> None:
            assert (answer[0], answer[1]["success"]) == (400, False), answer
            assert why in answer[1]["message"], answer
            assert served.engine.version == 0

        await refused(await push.end(1), "begin_weight_update first")
        await refused(await push.bucket(tensors, send=False), "begin_weight_update first")
        await push.begin(1)
        await push.bucket(tensors[1:])
        await refused(await push.end(1), "1 of")
        await push.begin(1)
        await push.bucket(tensors[:4])
        await refused(await push.bucket(tensors[3:], send=False), "received twice")
        await refused(await push.end(1), "begin_weight_update first")
        await push.begin(1)
        await refused(await push.bucket([("model.unknown", tensors[0][1])], send=False), "no tensor of this name")
        await push.begin(1)
        await refused(await push.bucket([(tensors[0][0], tensors[0][1][:-1])], send=False), "want shape")
        await push.begin(1)
        await refused(await push.bucket(tensors, send=False, group_name="other"), "no group 'other'")
        await push.begin()
        await push.bucket(tensors)
        await refused(await push.end(), "weight_version")
        # Begun again: the tensors of the first attempt do not count.
        await push.begin(1)
        await push.bucket(tensors[:6])
        await push.begin(1)
        await push.bucket(tensors[6:])
        await refused(await push.end(1), "6 of")
        again = await served.generate(prompt, temperature=0, max_new_tokens=8)
        assert again["output_ids"] == want["output_ids"]
        np.testing.assert_array_equal(told_log_probs(again), told_log_probs(want))
        await push.whole(models[1], 1)
        whole = (await served.post("/weights_checker", {"action": "checksum"}))[1]
        # The other copy is the standby now: half a push into it changes no answer.
        await push.begin(2)
        await push.bucket(list(named(models[2]))[:6])
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
        assert (await served.post("/weights_checker", {"action": "checksum"}))[1] == whole


async def test_a_push_that_breaks_off_leaves_the_served_weights(directories: list[Path], models: list[Any]) -> None:
    (prompt,) = prompts(1)
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served:
        async with joined(served) as push:
            await push.begin(1)
            await push.bucket(tensors[:4])
            status, answer = await push.bucket(tensors[4:], send=False, timeout_s=0.2)  # no message is sent
            assert (status, answer["success"]) == (400, False)
            assert (await push.end(1))[0] == 400
        async with joined(served) as push:  # the same name again
            await push.begin(1)
            asked = asyncio.create_task(push.bucket(tensors, send=False, timeout_s=LIMIT_S))
            await served.until(lambda: any(each.receiving for each in served.engine.updates.groups.values()))
            push.group.close()  # the learner dies
            status, answer = await asked
            assert (status, "lost" in answer["message"]) == (400, True)
        told = await served.generate(prompt, temperature=0, max_new_tokens=8)
        assert told["output_ids"] == await greedy(models[0], prompt, 8)
        async with joined(served) as push:
            await push.whole(models[1], 1)
        told = await served.generate(prompt, temperature=0, max_new_tokens=8)
        assert told["output_ids"] == await greedy(models[1], prompt, 8)
        assert (await served.post("/destroy_weights_update_group", {"group_name": "push"}))[0] == 200
        assert (await served.post("/destroy_weights_update_group", {"group_name": "push"}))[0] == 400


async def test_a_client_that_hangs_up_does_not_tear_the_standby_copy(
    directories: list[Path], models: list[Any]
) -> None:
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served) as push:
        await push.begin(1)
        asked = asyncio.create_task(push.bucket(tensors, send=False))
        await served.until(lambda: any(each.receiving for each in served.engine.updates.groups.values()))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await push.begin(2)  # discards version 1; its message still arrives
        await asyncio.to_thread(
            push.group.send,
            torch.cat([tensor.detach().flatten().view(torch.uint8) for _, tensor in tensors]),
            LIMIT_S,
        )
        await push.bucket(named(models[2]))
        assert (await push.end(2))[0] == 200
        (prompt,) = prompts(1)
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[2], prompt, 8
        )


async def test_a_verb_outlives_its_caller(directories: list[Path]) -> None:
    """Otherwise a thread would continue to write the standby copy while the next push is admitted."""
    from tidemill.actors.serving.builtin.engine import BuiltinEngine

    engine = BuiltinEngine(directories[0], authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    written, ends = asyncio.Event(), asyncio.Event()

    async def verb() -> None:
        await written.wait()
        ends.set()

    caller = asyncio.create_task(engine.updates.run_shielded(verb()))
    await turn()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert caller.cancelled()
    written.set()
    await engine.close()
    assert ends.is_set()


async def test_a_bucket_of_a_discarded_push_that_comes_late_is_not_written(
    directories: list[Path], models: list[Any]
) -> None:
    old = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served, "old") as before, joined(served, "new") as push:
        await before.begin(1)
        asked = asyncio.create_task(before.bucket(old, send=False))
        await served.until(lambda: any(each.receiving for each in served.engine.updates.groups.values()))
        await push.begin(2)
        await push.bucket(named(models[2]))
        message = torch.cat([tensor.detach().flatten().view(torch.uint8) for _, tensor in old])
        await asyncio.to_thread(before.group.send, message, LIMIT_S)
        status, answer = await asked
        assert (status, "another one has begun" in answer["message"]) == (400, True)
        assert (await push.end(2))[0] == 200
        (prompt,) = prompts(1)
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[2], prompt, 8
        )


async def test_tensors_one_by_one_and_in_other_types(directories: list[Path], models: list[Any]) -> None:
    """SGLang's other format, and a bucket of mixed types."""
    (prompt,) = prompts(1)
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served) as push:
        await push.begin(1)
        assert (await push.bucket(tensors, flat=False))[0] == 200
        assert (await push.end(1))[0] == 200
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
        whole = named(models[2])
        mixed = [(name, tensor.bfloat16() if name.endswith("norm.weight") else tensor) for name, tensor in whole]
        odd = ("model.norm.weight", dict(mixed)["model.norm.weight"])
        await push.begin(2)
        assert (await push.bucket([odd, *[each for each in mixed if each[0] != odd[0]]]))[0] == 200
        assert (await push.end(2))[0] == 200
        told = await served.generate(prompt, temperature=0, max_new_tokens=8)
        rounded = deepcopy(models[2])
        for name, parameter in rounded.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data = parameter.data.bfloat16().float()
        want = log_probs_of(await scores(rounded, prompt, told["output_ids"]), told["output_ids"])
        np.testing.assert_allclose(told_log_probs(told), want, atol=1e-4)


async def test_a_lower_epoch_is_refused_everywhere(directories: list[Path], models: list[Any]) -> None:
    tensors = list(named(models[1]))
    async with serving(directories[0]) as served, joined(served, epoch=5) as push:
        await push.begin(1)
        await push.bucket(tensors[:4])
        for path in (
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/update_weights_from_disk",
            "/pause_generation",
            "/continue_generation",
        ):
            status, answer = await served.post(path, {"epoch": 4})
            assert (status, answer["epoch"], "epoch 4 is stale, epoch 5 was seen" in answer["message"]) == (
                409,
                5,
                True,
            )
        assert (await served.post("/begin_weight_update", {"epoch": "6"}))[0] == 400
        # A newer learner takes over in the middle: the old learner's tensors are not mixed with the new one's.
        push.fields = {"epoch": 6}
        status, answer = await push.bucket(tensors[4:], send=False)
        assert (status, "epoch 6" in answer["message"]) == (400, True)
        await push.whole(models[1], 1)
        assert (served.engine.version, served.engine.epoch) == (1, 6)


async def test_a_request_can_wait_for_a_version(directories: list[Path], models: list[Any]) -> None:
    (prompt,) = prompts(1)
    async with serving(directories[0]) as served:
        waiting = asyncio.create_task(
            served.client.generate(prompt, Sampling(temperature=0.0, max_new_tokens=8), min_version=2)
        )
        status, answer = await served.post(
            "/generate", {"input_ids": prompt, "min_version": 1, "min_version_timeout_s": 0.05}
        )
        assert (status, "version 1 is not served: version 0 is" in answer["error"]["message"]) == (503, True)
        await served.engine.load_snapshot(directories[1], 1)
        assert not waiting.done()
        await served.engine.load_snapshot(directories[2], 2)
        told = await waiting
        assert (told.tokens.tolist(), told.version) == (await greedy(models[2], prompt, 8), 2)


async def test_a_tensor_at_an_odd_place_in_a_bucket(tmp_path: Path) -> None:
    """63 numbers of two bytes, then numbers of four: SGLang's senders do not align them."""
    changes = {"intermediate_size": 63, "mlp_bias": True}
    model = tiny_model("llama", seed=1, **changes)
    odd = "model.layers.0.mlp.gate_proj.bias"
    tensors = [(name, tensor.bfloat16() if name == odd else tensor) for name, tensor in named(model)]
    tensors.sort(key=lambda each: each[0] != odd)
    async with serving(write_tiny_model(tmp_path, "llama", **changes)) as served, joined(served) as push:
        await push.begin(1)
        assert (await push.bucket(tensors))[0] == 200
        assert (await push.end(1))[0] == 200
        (prompt,) = prompts(1)
        told = await served.generate(prompt, temperature=0, max_new_tokens=8)
        want = log_probs_of(await scores(model, prompt, told["output_ids"]), told["output_ids"])
        np.testing.assert_allclose(told_log_probs(told), want, atol=0.05)


async def test_a_tied_output_projection_may_be_sent_if_it_is_the_same(tmp_path: Path) -> None:
    model = tiny_model(seed=1, tied=True)
    tensors = list(named(model))
    alias = ("lm_head.weight", model.lm_head.weight)
    async with serving(write_tiny_model(tmp_path, tied=True)) as served, joined(served) as push:
        await push.begin(1)
        await push.bucket([*tensors, alias])
        assert (await push.end(1))[0] == 200
        await push.begin(2)
        await push.bucket([*tensors, ("lm_head.weight", model.lm_head.weight + 1)])
        status, answer = await push.end(2)
        assert (status, "ties it" in answer["message"]) == (400, True)
        assert served.engine.version == 1


async def test_the_owner_hears_of_every_update(directories: list[Path]) -> None:
    from tidemill.actors.serving.builtin.engine import BuiltinEngine

    heard: list[tuple[int, int]] = []
    engine = BuiltinEngine(
        directories[0],
        on_update=lambda version, epoch: heard.append((version, epoch)),
        authority=Authority(unguarded=True),
    )
    await asyncio.to_thread(engine.load)
    await engine.start()
    try:
        await engine.load_snapshot(directories[1], 3, epoch=2)
        with pytest.raises(UpdateRefused):
            await engine.load_snapshot(directories[1], 2, epoch=2)
    finally:
        await engine.close()
    assert heard == [(3, 2)]


async def test_what_a_broken_push_brings_late_is_written_nowhere(directories: list[Path], models: list[Any]) -> None:
    """This holds also when tensors are received in place: a new push fills other memory."""
    async with serving(directories[0]) as served, joined(served) as old:
        for version in range(1, 4):
            await old.whole(models[0], version)
        updates = served.engine.updates
        assert updates.standby is not None and updates.standby.order == updates._standby.order != ()
        await old.begin(4)
        tensors = list(named(models[2]))[:1]  # one tensor is received in place, unless the runner has no place for any
        asked = asyncio.create_task(old.bucket(tensors, send=False))
        await served.until(lambda: any(each.receiving for each in updates.groups.values()))
        async with joined(served, "new") as push:
            await push.whole(models[1], 4)
            await asyncio.to_thread(old.group.send, flat(tensors), LIMIT_S)
            assert (await asked)[0] == 400
            assert serves(served, models[1])
            await push.whole(models[0], 5)
            assert serves(served, models[0])
