"""The keys of a run: the requests that each key admits, their secrecy, and the number of reads from the bus."""

import math

import pytest

from tidemill.bus import keys
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.keys import Keys, RunKeys

KEYS = Keys.of("s3cret")


@pytest.mark.parametrize(
    ("presented", "command", "request_"),
    [
        (KEYS.admin, True, True),
        (KEYS.api, False, True),
        ("", False, False),
        ("s3cre", False, False),
        ("s3cret\udcff", False, False),
    ],
)
def test_what_a_key_opens(presented: str, command: bool, request_: bool) -> None:
    assert (KEYS.admits(presented, admin=True), KEYS.admits(presented, admin=False)) == (command, request_)


def test_nothing_opens_what_has_no_key() -> None:
    assert not any(Keys().admits(presented, admin=admin) for presented in ("", "x") for admin in (False, True))
    assert not Keys(api="a").admits("", admin=True)
    assert Keys.of("") == Keys() and Keys().headers == {}


def test_keys_are_not_shown_and_one_does_not_reveal_the_other() -> None:
    assert "s3cret" not in repr(KEYS) and KEYS.api not in repr(KEYS) and "s3cret" not in KEYS.api
    assert KEYS.headers == {"Authorization": "Bearer s3cret"}
    assert Keys(api="a").headers == {"Authorization": "Bearer a"}


async def test_wrong_keys_cause_no_repeated_reads_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_AGAIN_S", math.inf)
    reads = list[int]()

    async def read() -> Keys:
        reads.append(1)
        return KEYS

    known = RunKeys(read)
    assert [await known.known() for _ in range(3)] == [await known.newest() for _ in range(3)] == [KEYS] * 3
    assert len(reads) == 1


async def test_known_keys_stay_while_the_bus_is_away_and_are_read_again() -> None:
    answers: list[Keys | None] = [None, KEYS]

    async def read() -> Keys:
        answer = answers.pop(0)
        if answer is None:
            raise BusUnavailable("nats://b", "gone")
        return answer

    known = RunKeys(read)
    with pytest.raises(BusUnavailable):
        await known.known()
    assert await known.headers() == KEYS.headers
    assert await known.known() == KEYS
