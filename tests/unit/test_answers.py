"""The meaning of a stream's answer: stored, refused, or unavailable for now."""

import json

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tidemill.bus.client.outbox import STREAM_FULL, PublishAck, _read
from tidemill.bus.errors import BusUnavailable, Refused


def answer(**fields: object) -> Msg:
    return Msg(_client=Client(), subject="inbox", data=json.dumps(fields).encode())


def error(code: int, err_code: int) -> Msg:
    return answer(error={"code": code, "err_code": err_code, "description": "why"})


def test_a_stored_message_is_acknowledged() -> None:
    assert _read("s", answer(seq=7)) == PublishAck(7, False)
    assert _read("s", answer(seq=7, duplicate=True)) == PublishAck(7, True)


@pytest.mark.parametrize(("code", "err_code"), [(503, 10008), (503, 10118), (409, 10158), (500, 10008)])
def test_a_cluster_between_two_leaders_is_unavailable(code: int, err_code: int) -> None:
    with pytest.raises(BusUnavailable, match=rf"why \({err_code}\)"):
        _read("s", error(code, err_code))


@pytest.mark.parametrize(("code", "err_code"), [(503, STREAM_FULL), (400, 10071), (400, 10164), (400, 10054)])
def test_a_full_stream_and_a_wrong_place_are_refusals(code: int, err_code: int) -> None:
    with pytest.raises(Refused) as refused:
        _read("s", error(code, err_code))
    assert refused.value.code == err_code
