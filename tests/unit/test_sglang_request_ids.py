"""Request ids of a request's responses, at its client and at the server."""

import json
from typing import Any

import pytest

from tidemill.actors.serving.sglang.aborts import RequestIds

BATCH: dict[str, Any] = {"input_ids": [[5], [6, 7]], "rid": "both"}
ONE: dict[str, Any] = {"input_ids": [5, 6], "rid": "mine"}


def test_the_server_gets_other_names_of_one_length_each_time() -> None:
    names = RequestIds(BATCH, 2)
    asked = [*names.for_sending(), *names.for_sending()]
    assert len(set(asked)) == 4 and {len(one) for one in asked} == {32}
    assert names.at_server == {asked[2]: "both_0", asked[3]: "both_1"}
    assert isinstance(RequestIds(ONE, 1).for_sending(), str)
    assert len(RequestIds({"text": ["a"], "rid": "x"}, 1).for_sending()) == 1, "a list of one is a list"


@pytest.mark.parametrize(
    ("body", "responses", "named", "meant"),
    [
        (ONE, 1, "mine", {"mine"}),
        (ONE, 1, None, {"mine"}),
        (ONE, 1, "min", set()),
        (ONE, 1, "mine_0", set()),
        (ONE, 1, "mine-2", set()),
        (BATCH, 2, "both", {"both_0", "both_1"}),
        (BATCH, 2, "both_1", {"both_1"}),
        (BATCH, 2, "both_10", set()),
        ({**BATCH, "rid": ["a", "b"]}, 2, "b", {"b"}),
        ({**BATCH, "rid": ["a", "a_1"]}, 2, "a_1", {"a_1"}),
        (ONE, 3, "mine", {"mine_0", "mine_1", "mine_2"}),
    ],
)
def test_who_is_meant(body: dict[str, Any], responses: int, named: str | None, meant: set[str]) -> None:
    assert RequestIds(body, responses).matching(named) == meant


def test_its_client_sees_its_own() -> None:
    names = RequestIds({**BATCH, "rid": ['a"', "b"]}, 2)
    first, second = names.for_sending()
    said = json.dumps([{"meta_info": {"id": first}}, {"meta_info": {"id": second}, "text": f'"id":"{first}"'}]).encode()
    told = json.loads(names.with_client_ids(said))
    assert [one["meta_info"]["id"] for one in told] == ['a"', "b"]
    assert told[1]["text"] == f'"id":"{first}"', "what a model says is its own"


@pytest.mark.parametrize(
    ("body", "responses"), [({**ONE, "session_params": {"id": "s"}}, 1), (ONE, 2), ({**BATCH, "rid": ["a", "b"]}, 4)]
)
def test_names_that_must_stay(body: dict[str, Any], responses: int) -> None:
    names = RequestIds(body, responses)
    assert names.for_sending() == body["rid"]
    assert names.with_client_ids(b'{"id":"mine"}') == b'{"id":"mine"}'
    assert list(names.at_server) == (["mine"] if responses == 1 else [])


def test_one_without_a_name_gets_one() -> None:
    names = RequestIds({"input_ids": [5]}, 1)
    assert names.matching(None) == {names.given} and len(names.given) == 32
