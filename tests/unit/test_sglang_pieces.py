"""A response asked for in pieces: what is asked for next, where it ends, and that its parts add up."""

from collections.abc import Sequence
from typing import Any

import pytest

from actors.builtin.text import Text
from actors.errors import BadRequest, EngineFailed
from actors.sglang.api import Api
from actors.sglang.pieces import Pieces, Response
from actors.sglang.releases import release_of
from tests.tiny_models import tiny_tokenizer

EOS = 1
PROMPT = [5, 6, 7]
CONTEXT = 64


@pytest.mark.parametrize(
    ("said", "spans", "three_phases", "flush_needs_idle", "cpu_checksums"),
    [
        ("0.5.15.post1", False, False, True, False),
        ("0.5.17", False, False, True, False),
        ("0.5.18", False, False, True, False),
        ("v0.5.19", True, False, True, False),
        ("0.5.20", True, False, True, False),
        ("0.5.21", True, True, False, False),
        ("0.5.22", True, True, False, False),
        ("0.5.23", True, True, False, True),
        ("0.6.0rc1", True, True, False, True),
    ],
)
def test_what_a_release_can_do(said: str, spans: bool, three_phases: bool, flush_needs_idle: bool, cpu_checksums: bool) -> None:
    release = release_of("e", said)
    assert (release.spans, release.three_phases) == (spans, three_phases)
    assert (release.flush_needs_idle, release.cpu_checksums) == (flush_needs_idle, cpu_checksums)


@pytest.mark.parametrize("said", ["0.5.14", "0.4.9.post2", "", None, "main"])
def test_a_release_that_is_not_known_is_refused(said: object) -> None:
    with pytest.raises(EngineFailed, match="want"):
        release_of("e", said)


def text() -> Text:
    return Text(tiny_tokenizer(), (EOS,))


def response(text: Text | None = None, **params: Any) -> Response:
    body = {"input_ids": PROMPT, "rid": ("r",), "sampling_params": {"max_new_tokens": 12, **params}, "return_logprob": True}
    return Response(body, text, eos_ids=frozenset({EOS}), max_context=CONTEXT)


def answer(tokens: Sequence[int], version: int, finish: Any = None, **more: Any) -> dict[str, Any]:
    entries = [[-0.1 * token, token, None] for token in tokens]
    meta = {"id": "x", "finish_reason": finish, "prompt_tokens": 3, "weight_version": str(version), "output_token_logprobs": entries}
    return {"text": "?", "output_ids": list(tokens), "meta_info": {**meta, **more}}


ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


def cut(one: Response, tokens: Sequence[int], version: int) -> None:
    one.cut = True
    assert one.take(answer(tokens, version, ABORT))


def spans(one: Response) -> list[tuple[str, int, int]]:
    assert one.latest is not None
    return [(span["version"], span["start"], span["end"]) for span in one.latest["meta_info"]["weight_versions"]]


def test_pieces_add_up() -> None:
    one = response(min_new_tokens=4)
    assert one.next_piece()["input_ids"] == PROMPT
    cut(one, [10, 11], 0)
    assert not one.finished
    asked = one.next_piece()
    assert asked["input_ids"] == [*PROMPT, 10, 11]
    assert (asked["sampling_params"]["max_new_tokens"], asked["sampling_params"]["min_new_tokens"]) == (10, 2)
    cut(one, [], 1)  # aborted in the queue
    one.next_piece()
    cut(one, [12], 2)
    one.next_piece()
    assert one.take(answer([13, 14], 2, {"type": "length", "length": 2}, prompt_tokens=6, cached_tokens=5))
    assert one.finished
    assert one.latest is not None
    meta = one.latest["meta_info"]
    assert one.latest["output_ids"] == [10, 11, 12, 13, 14] == [entry[1] for entry in meta["output_token_logprobs"]]
    assert spans(one) == [("0", 0, 2), ("2", 2, 5)]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"], meta["id"]) == (3, 0, 5, "r")


def test_a_cut_piece_that_was_whole_is_not_continued() -> None:
    """The abort comes before the look for an end: the last token may be one."""
    for tokens, params, finish in (
        ([10, EOS], {}, {"type": "stop", "matched": EOS}),
        ([10, 40], {"stop_token_ids": [40]}, {"type": "stop", "matched": 40}),
        (list(range(10, 22)), {}, {"type": "length", "length": 12}),
    ):
        one = response(**params)
        one.next_piece()
        cut(one, tokens, 0)
        assert one.finished
        assert one.latest is not None and one.latest["meta_info"]["finish_reason"] == finish
    for tokens, params in (([10, EOS], {"ignore_eos": True}), ([EOS, 10], {}), ([10, EOS], {"min_new_tokens": 2})):
        one = response(**params)
        one.next_piece()
        cut(one, tokens, 0)
        assert not one.finished, (tokens, params)


def test_an_end_that_was_asked_for_is_one() -> None:
    one = response()
    one.next_piece()
    one.stopped.set()
    cut(one, [10, 11], 0)
    assert one.finished
    assert one.latest is not None and one.latest["meta_info"]["finish_reason"]["type"] == "abort"
    other = response()
    other.next_piece()
    assert other.take(answer([10], 0, ABORT)), "nobody here cut it"
    assert other.finished


def test_a_stop_string_across_the_seam_ends_it_where_it_would_have_ended() -> None:
    ids = text().encode("abcdefgh", add_special=False)
    stop = "cde"
    end = next(length for length in range(len(ids)) if stop in text().decode(ids[:length]))
    assert end >= 4
    for length in range(1, end + 1):
        one = response(text(), stop=stop)
        one.next_piece()
        cut(one, ids[:length], 0)
        if not one.finished:
            assert stop not in text().decode(ids[length:]) or length < 3, "the server does not see it"
            one.next_piece()
            one.take(answer(ids[length:], 1))
        assert one.finished
        assert one.latest is not None
        assert (one.latest["output_ids"], one.latest["text"]) == (ids[:end], "ab")
        assert one.latest["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert spans(one)[-1][2] == end


def test_a_body_is_one_response_each() -> None:
    pieces = Pieces(Api("http://127.0.0.1:1"), text(), eos_ids=frozenset(), max_context=CONTEXT, extra_key=lambda: "", paused=lambda: False)
    body = {
        "input_ids": [[5], [6]],
        "rid": "r",
        "sampling_params": [{"n": 2, "temperature": 0.5}, {}],
        "stream": True,
        "extra_key": ["a", "b"],
    }
    responses, many = pieces.split(body)
    assert many
    asked = [one.next_piece() for one in responses]
    assert [(one["input_ids"], one["extra_key"], one["sampling_params"]["n"]) for one in asked] == [
        ([5], "a", 1),
        ([5], "a", 1),
        ([6], "b", 1),
    ]
    assert [one.names for one in responses] == [("r_0", "r"), ("r_1", "r"), ("r_2", "r")]
    assert len({one["rid"] for one in asked}) == 3
    (one,), many = pieces.split({"text": "abc", "sampling_params": {"max_new_tokens": 2}})
    assert not many and one.next_piece()["input_ids"] == text().encode("abc")


@pytest.mark.parametrize(
    "more", [{"sampling_params": {"regex": "a+"}}, {"sampling_params": {"frequency_penalty": 0.5}}, {"return_entropy": True}]
)
def test_what_cannot_be_continued_is_refused_at_the_start(more: dict[str, Any]) -> None:
    pieces = Pieces(Api("http://127.0.0.1:1"), None, eos_ids=frozenset(), max_context=CONTEXT, extra_key=lambda: "", paused=lambda: False)
    with pytest.raises(BadRequest, match="cannot continue it after an update"):
        pieces.split({"input_ids": [5], **more})
    pieces.split({"input_ids": [5], "sampling_params": {"frequency_penalty": 0, "repetition_penalty": 1.0, "regex": None}})
