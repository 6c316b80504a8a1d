"""Parts of the built-in engine that need neither a socket nor a model: sequences, stop strings, progress, client
errors.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.refusals import refusal
from tests.tiny_models import SERVED, tiny_model, write_tiny_tokenizer
from tests.waits import LIMIT_S
from tidemill.actors.engines.engine_client import read_generation
from tidemill.actors.errors import EngineFailed
from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin.backend import Progress, response_json
from tidemill.actors.serving.builtin.receiving import JoinedGroup
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest, Sequence
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import MAPPED_BYTES, read_safetensors
from tidemill.actors.text.text import StopStrings, Text
from tidemill.bus.wire.messages import Span
from tidemill.launch.checks.model import tensors_in
from tidemill.weightstore.format.manifest import Bucket


def new_sequence(**params: object) -> Sequence:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Sequence(
        ResponseRequest(rid="rid", prompt=np.array([5, 6, 7], np.int32), params=sampling, seed=1),
        model=Model(eos_ids=frozenset({2}), max_context=20, text=None),
        sink=lambda sequence, num_tokens, ended: None,
    )


def test_spans_cover_the_tokens_and_skip_versions_that_made_none() -> None:
    sequence = new_sequence()
    for version, count in ((0, 2), (1, 0), (2, 3), (2, 1)):
        sequence.enter(version)
        for _ in range(count):
            sequence.append(9, -1.0)
    assert sequence.weight_versions(6) == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 6},
    ]
    assert sequence.weight_versions(3) == [
        {"version": "0", "start": 0, "end": 2},
        {"version": "2", "start": 2, "end": 3},
    ]
    assert sequence.weight_versions(2) == [{"version": "0", "start": 0, "end": 2}]
    assert new_sequence().weight_versions(0) == []


def test_what_ends_a_response() -> None:
    sequence = new_sequence(max_new_tokens=3, stop_token_ids=frozenset({30}))
    assert [sequence.append(token, -1.0) for token in (8, 9, 10)] == [False, False, True]
    assert sequence.finish == {"type": "length", "length": 3}
    for token in (2, 30):
        sequence = new_sequence(stop_token_ids=frozenset({30}))
        assert sequence.append(token, -1.0)
        assert sequence.finish == {"type": "stop", "matched": token}
        assert not new_sequence(stop_token_ids=frozenset({30}), ignore_eos=True).append(token, -1.0)
    assert new_sequence(max_new_tokens=100).max_new_tokens == 17


def test_a_retracted_sequence_has_another_key() -> None:
    sequence = new_sequence()
    first = sequence.key
    sequence.append(9, -1.0)
    sequence.retract()
    assert sequence.key != first
    assert sequence.context().tolist() == [5, 6, 7, 9]


def test_a_partial_answer_has_no_end_even_when_the_thread_has_come_to_one() -> None:
    """The decoding thread runs ahead of the loop's answers."""

    sequence = new_sequence(max_new_tokens=2)
    sequence.enter(4)
    for token in (8, 9):
        sequence.append(token, -1.0)
    part = response_json(sequence, None, 4, logprobs=True, partial=1)
    assert (part["output_ids"], part["meta_info"]["finish_reason"]) == ([8], None)
    assert part["meta_info"]["output_token_logprobs"] == [(-1.0, 8, None)]
    assert part["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 1}]
    whole = response_json(sequence, None, 4, logprobs=False)
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    found = Text.read(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    assert found is not None
    return found


@pytest.mark.parametrize("stop", ["seven", "\n", "é 日本", "0 1 2", "🙂"])
def test_a_stop_string_is_found_with_the_token_that_completes_it(text: Text, stop: str) -> None:
    """A stop string is also found when it is spread over many tokens, and over the bytes of one character."""
    ids = text.encode(f"three plus é is, well, {stop} and more")
    stops = StopStrings(text, ("never", stop))
    first = next(count for count in range(1, len(ids) + 1) if stops.find(ids[:count]))
    assert stops.find(ids[:first]) == stop
    assert stop in text.decode(ids[:first])
    assert stop not in text.decode(ids[: first - 1])


def test_the_tokenizers_own_end_is_known(text: Text) -> None:
    assert text.eos_ids == (2,)
    assert text.decode([2, *text.encode("four"), 2]) == "four"
    assert text.decode([*text.encode("four"), 2], skip_special=False) == "four<|im_end|>"


def test_progress_gives_the_newest_state_of_each() -> None:
    async def main() -> None:
        progress = Progress()
        sequences = [new_sequence(), new_sequence()]
        for sequence in sequences:
            sequence.stream = True
            progress.add(sequence)
        changes = progress.changes()
        for count in (1, 2, 3):
            progress.update(sequences[1], count, False)
        assert await anext(changes) == (1, 3, False)
        progress.update(sequences[0], 4, True)
        progress.update(sequences[1], 5, True)
        assert [change async for change in changes] == [(0, 4, True), (1, 5, True)]
        assert progress.done

    asyncio.run(main())


@pytest.mark.parametrize("family", [*SERVED, "mistral"])
def test_names_and_shapes_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    for tied in (False, True):
        changes = {} if family in ("qwen2", "mistral") else {"attention_bias": True}
        tiny_model(family, tied=tied, **changes).save_pretrained(tmp_path)
        assert ModelShape.read(tmp_path).tensors() == tensors_in(tmp_path)


def test_an_answer_of_sglang_is_parsed_and_a_broken_one_refused() -> None:
    """An answer of SGLang 0.5.23, as recorded."""
    meta = {
        "id": "5b34",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 5,
        "weight_version": "2",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-5.59, 83, None], [-0.5, 196, None], [-1.5, 289, None]],
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}],
        "cached_tokens_details": None,
        "e2e_latency": 0.1217,
    }
    told = {"text": "...", "output_ids": [83, 196, 289], "meta_info": meta}
    found = read_generation("http://x", told)
    assert found.tokens.tolist() == [83, 196, 289]
    assert found.spans == (Span(version=1, num_tokens=1), Span(version=2, num_tokens=2))
    assert (found.version, found.finish) == (2, "length")
    for wrong in (
        {"output_token_logprobs": meta["output_token_logprobs"][:2]},  # type: ignore[index]
        {"weight_versions": []},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"finish_reason": 3},
        {"id": None, "prompt_tokens": None, "output_token_logprobs": None},
    ):
        with pytest.raises(EngineFailed):
            read_generation("http://x", told | {"meta_info": meta | wrong})
    with refusal(EngineFailed, reason="broken"):
        read_generation("http://x", {"error": {"message": "broken"}})


async def test_a_buffer_that_is_too_small_is_freed_before_its_message_is_received() -> None:
    class Messages:
        buffers: ClassVar[list[int]] = []

        def receive(self, num_bytes: int, timeout_s: float, into: torch.Tensor) -> torch.Tensor:
            self.buffers.append(len(into))
            return into[:num_bytes] if len(into) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)

        def close(self) -> None:
            pass

    group = JoinedGroup(Messages())  # type: ignore[arg-type]
    for num_bytes in (10, 20, 15):
        bucket = Bucket(specs=(), num_bytes=num_bytes)
        group.return_buffer(await (await group.receive(bucket, LIMIT_S)).future)
    assert Messages.buffers == [0, 0, 20]
    group.close()


def test_a_weight_file_is_mapped_in_pieces(tmp_path: Path) -> None:
    """Otherwise loading a model would need twice its memory, by the pages of the file."""
    tensors = {f"layer.{number:02}": torch.full((4_000_000,), float(number)) for number in range(10)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    mapped, names = 0, []
    for name, tensor in read_safetensors(tmp_path):
        assert tensor.sum() == 4_000_000 * int(name[-2:])
        names.append(name)
        mapped = max(mapped, mapped_bytes(file))
    assert names == sorted(tensors)
    assert 16_000_000 <= mapped < 1.5 * MAPPED_BYTES


def mapped_bytes(file: Path) -> int:
    """Return the bytes of a file that are in this process's memory by mappings."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    resident = [next(part for part in lines if part.startswith("Rss:")) for line in lines if line.endswith(str(file))]
    return sum(1024 * int(line.split()[1]) for line in resident)
