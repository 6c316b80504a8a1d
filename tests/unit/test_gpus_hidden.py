"""GPUs are hidden from tests of CPUs, and only from these."""

import pytest

from tests.conftest import wants_gpus


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        ("", False),
        ("not slow and not gpu", False),
        ("not gpu", False),
        ("slow", False),
        ("gpu", True),
        ("not slow and gpu", True),
    ],
)
def test_the_marks_decide(marks: str, wanted: bool) -> None:
    assert wants_gpus(marks) is wanted
