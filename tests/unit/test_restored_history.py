"""Texts of turns in front of a stored state give the very ids again, whatever ids without text an answer has."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.actor_kit import PROMPT, model_dir
from tidemill.actors.episodes.calls import AnsweredCall, answer_of, remember_restored
from tidemill.actors.episodes.recorder import TurnRecorder
from tidemill.actors.episodes.turn_log import StoredTurn
from tidemill.actors.router.token_history import ModelText, TokenHistory
from tidemill.actors.router.tree import TokenPiece
from tidemill.bus.wire.codec import TurnKind, TurnRecord
from tidemill.bus.wire.messages import Span

MOST = 1 << 20


@pytest.fixture(scope="module")
def model() -> ModelText:
    return ModelText.read(str(model_dir()), "model")


def answers(model: ModelText, text: str) -> Iterator[tuple[list[int], str, int | None]]:
    """Yield (ids, finish, matched) of answers with this text: with and without the end token, and with padding
    somewhere.
    """
    ids = model.text.encode(text)
    pad, end = (model.text.encode(name)[0] for name in ("<pad>", "<eos>"))
    for hidden in (ids, *([*ids[:at], pad, *ids[at:]] for at in range(len(ids) + 1))):
        yield hidden, "length", None
        yield [*hidden, end], "stop", end


def ids_of(pieces: Sequence[TokenPiece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def test_the_next_request_has_the_ids_that_it_had_in_the_earlier_life(model: ModelText) -> None:
    for first in answers(model, "0462"):
        for second in answers(model, "35=7,"):
            history, recorder, text, stored = TokenHistory(model, MOST), TurnRecorder(), PROMPT, list[StoredTurn]()
            for number, (ids, finish, matched) in enumerate((first, second)):
                pieces = asyncio.run(history.pieces(text))
                prompt, tokens = np.array(ids_of(pieces), np.int32), np.array(ids, np.int32)
                parent, context = recorder.behind(prompt)
                record = TurnRecord(
                    kind=TurnKind.TURN,
                    run="r",
                    task=1,
                    index=0,
                    attempt="a",
                    number=number,
                    parent=parent,
                    context=context,
                    tokens=tokens,
                    log_probs=np.full(len(tokens), -0.5, np.float32),
                    spans=(Span(version=1, num_tokens=len(tokens)),),
                    finish=finish,
                    matched=matched,
                    text=model.text.decode(ids),
                )
                turn = StoredTurn(prompt, record)
                history.remember(pieces, answer_of(AnsweredCall(prompt, turn.output("t"), turn.response(), turn), "t"))
                recorder.record(prompt, turn.output("t"))
                stored.append(turn)
                text += record.text + "="
            again = TokenHistory(model, MOST)
            remember_restored(again, model, stored)
            assert ids_of(asyncio.run(again.pieces(text))) == ids_of(asyncio.run(history.pieces(text))), (first, second)


def test_of_answers_to_one_prompt_each_is_found_again(model: ModelText) -> None:
    """The second answer does not hide the first, which the request goes on behind."""
    pad = model.text.encode("<pad>")[0]
    ids = {text: model.text.encode(text) for text in (PROMPT, "12", "34", "=")}
    turns = [
        StoredTurn(
            np.array(ids[PROMPT], np.int32),
            TurnRecord(
                kind=TurnKind.TURN,
                run="r",
                task=1,
                index=0,
                attempt="a",
                number=number,
                context=np.array(ids[PROMPT], np.int32),
                tokens=np.array([pad, *ids[text]], np.int32),
                log_probs=np.full(3, -0.5, np.float32),
                spans=(Span(version=1, num_tokens=3),),
                finish="length",
                text=text,
            ),
        )
        for number, text in enumerate(("12", "34"))
    ]
    behind = np.array([*ids[PROMPT], pad, *ids["12"], *ids["="]], np.int32)
    third = TurnRecord(
        **{field: getattr(turns[0].record, field) for field in TurnRecord.__slots__} | {"number": 2, "parent": 0}
    )
    history = TokenHistory(model, MOST)
    remember_restored(history, model, [*turns, StoredTurn(behind, third)])
    assert ids_of(asyncio.run(history.pieces(f"{PROMPT}12=12="))) == [*behind.tolist(), pad, *ids["12"], *ids["="]]
