"""The digits and exact rewards, by table and by properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.bus.wire.messages import Status
from tidemill.rewards.digits import digits
from tidemill.rewards.exact import exact
from tidemill.rewards.port import RewardRequest


def request(response: str, label: object, status: Status = Status.COMPLETED) -> RewardRequest:
    return RewardRequest(prompt="p", response=response, label=label, status=status)


@pytest.mark.parametrize(
    ("response", "label", "status", "want"),
    [
        ("123", "123", Status.COMPLETED, 1.0),
        ("123", 123, Status.COMPLETED, 1.0),
        ("123", "123", Status.TRUNCATED, 3 / 4),
        ("12", "123", Status.COMPLETED, 2 / 4),
        ("1234", "123", Status.COMPLETED, 3 / 5),
        ("321", "123", Status.COMPLETED, 2 / 4),
        ("", "123", Status.COMPLETED, 0.0),
        ("9999", "1", Status.TRUNCATED, 0.0),
        ("", "", Status.COMPLETED, 1.0),
    ],
)
def test_digits_counts_right_positions_and_the_end(response: str, label: object, status: Status, want: float) -> None:
    assert digits(request(response, label, status)) == pytest.approx(want)


TEXT = st.text(alphabet="0123456789", max_size=8)


@settings(deadline=None)
@given(TEXT, TEXT, st.sampled_from([Status.COMPLETED, Status.TRUNCATED]))
def test_digits_is_one_only_for_the_label_itself(response: str, label: str, status: Status) -> None:
    reward = digits(request(response, label, status))
    assert 0 <= reward <= 1
    assert (reward == 1) == (response == label and status is Status.COMPLETED)


@settings(deadline=None)
@given(st.text(alphabet="0123456789", min_size=1, max_size=8), st.data())
def test_digits_grows_with_every_position_put_right(label: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(label) - 1))
    wrong = data.draw(st.lists(st.sampled_from("abc"), min_size=len(label), max_size=len(label)).map("".join))
    better = wrong[:place] + label[place] + wrong[place + 1 :]
    assert digits(request(better, label)) > digits(request(wrong, label))


@pytest.mark.parametrize(
    ("response", "label", "options", "want"),
    [
        (" yes\n", "yes", {}, 1.0),
        (" yes", "yes", {"strip": False}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"case_sensitive": False}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("7", 7, {}, 1.0),
    ],
)
def test_exact(response: str, label: object, options: dict[str, bool], want: float) -> None:
    assert exact(request(response, label), **options) == want
