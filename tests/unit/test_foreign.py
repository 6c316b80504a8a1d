"""Errors of foreign code become errors of ours: every kind of them, with the place that raised it."""

from concurrent.futures import Future

import pytest

from bus.system.foreign import errors_as, repr_of, settle, told


class Ours(Exception):
    """An error of ours."""


class Rude(Exception):
    """An error of somebody else, whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [KeyError("a"), SystemExit(3), StopIteration(), RecursionError(), Rude()], ids=lambda one: type(one).__name__
)
def test_every_error_becomes_one_of_ours(error: BaseException) -> None:
    with pytest.raises(Ours) as raised, errors_as(lambda error: Ours(told(error))):
        raise_(error)
    assert raised.value.__cause__ is error
    assert str(raised.value).startswith(type(error).__name__) and f"({__file__}, line " in str(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("late")], ids=lambda one: type(one).__name__)
def test_those_that_are_named_and_the_end_of_the_process_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, errors_as(lambda error: Ours(str(error)), but=(TimeoutError,)):
        raise_(error)
    assert raised.value is error


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise SystemExit


def test_an_error_without_a_repr_has_a_text() -> None:
    assert repr_of(KeyError("a")) == "KeyError('a')"
    assert repr_of(Unspeakable()) == "Unspeakable, whose repr raises SystemExit"


def test_a_future_gets_the_result_or_the_error() -> None:
    good: Future[int] = Future()
    bad: Future[int] = Future()
    settle(good, lambda: 3)
    settle(bad, lambda: 1 // 0)
    assert good.result() == 3 and isinstance(bad.exception(), ZeroDivisionError)
