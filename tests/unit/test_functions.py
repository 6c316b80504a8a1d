"""Functions by import path: found, or refused with the defect; what cannot be called ends a process for good, and no
restart cures it.
"""

import pickle
import sys
from pathlib import Path

import pytest

from tidemill.bus import exit_codes
from tidemill.bus.system.functions import Defect, FunctionRefused, check_call, find_function, find_object


async def later(a: int) -> int:
    return a


class Kind:
    NUMBER = 4

    def __init__(self, a: int) -> None:
        self.a = a


def plain(a: int) -> int:
    return a


NUMBER = 3
HERE = "tests.unit.test_functions"


@pytest.mark.parametrize(
    ("path", "defect", "reason"),
    [
        ("nowhere:f", Defect.MODULE, "cannot import nowhere: No module named 'nowhere'"),
        ("needs_nowhere:f", Defect.MODULE, "cannot import needs_nowhere: No module named 'nowhere'"),
        ("raises:f", Defect.IMPORT, "importing raises: ZeroDivisionError: division by zero"),
        ("exits:f", Defect.IMPORT, "importing exits: SystemExit: 3"),
        ("rewards.registry:load", Defect.MODULE, "rewards.registry is tidemill.rewards.registry now"),
        ("bus:f", Defect.MODULE, "bus is tidemill.bus now"),
        ("math", Defect.FORM, "no module, or no name in it"),
        (":f", Defect.FORM, "no module, or no name in it"),
        ("math:", Defect.FORM, "no module, or no name in it"),
        (f"{HERE}:plane", Defect.NAME, f"{HERE} has no 'plane' (nearest: 'plain')"),
        (f"{HERE}:Kind.nothing", Defect.NAME, f"{HERE} has no 'Kind.nothing'"),
        ("math:hypot3", Defect.NAME, "math has no 'hypot3' (nearest: 'hypot')"),
        (f"{HERE}:NUMBER", Defect.KIND, "want a callable, NUMBER is int"),
        (f"{HERE}:later", Defect.KIND, "an async function"),
        (f"{HERE}:Kind", Defect.KIND, "a class"),
        ("json:dump", Defect.SIGNATURE, "missing a required argument: 'fp'"),
    ],
)
def test_what_cannot_be_called_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, defect: Defect, reason: str
) -> None:
    for name, text in (("needs_nowhere", "import nowhere"), ("raises", "1 / 0"), ("exits", "raise SystemExit(3)")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FunctionRefused) as refused:
        check_call(find_function(path, "loss"), ("a",), path=path, setting="loss")
    error = refused.value
    assert (error.path, error.defect, error.setting) == (path, defect, "loss")
    assert error.reason.startswith(reason)
    assert str(error).startswith("loss: want ") and str(error).endswith(f", got {path!r}: {error.reason}")
    assert exit_codes.of(error) == exit_codes.CONFIG
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_name_may_have_dots() -> None:
    assert find_object(f"{HERE}:Kind.NUMBER") == 4
    assert check_call(find_function(f"{HERE}:plain"), ("a",), path="", setting="") == frozenset()


def test_a_module_of_the_users_own_may_have_the_name_of_a_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "actors.py").write_text("def mine(a): return a")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_function("actors:mine")(3) == 3
    monkeypatch.delitem(sys.modules, "actors")
