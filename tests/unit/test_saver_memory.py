"""The learner's memory on CUDA, with a stand-in for torch_memory_saver that is strict about the order of calls, as the
real one is.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tidemill.learner.errors import MemoryReleased
from tidemill.learner.trainer.memory import Memory, SaverMemory, open_memory, process_saver


class StrictSaver:
    """``hook_mode`` can be set until the first region, and not afterwards. Source: torch-memory-saver 0.0.10,
    entrypoint.py.
    """

    def __init__(self) -> None:
        self.regions: list[tuple[str, bool]] = []
        self._settings: dict[str, str] = {}

    @property
    def hook_mode(self) -> Any:
        raise AttributeError("the real one can only be set")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        self._settings["hook_mode"] = mode

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        if hasattr(self, "_settings"):
            assert self._settings == {"hook_mode": "torch"}
            del self._settings
        self.regions.append((tag, enable_cpu_backup))
        yield


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictSaver]:
    module = ModuleType("torch_memory_saver")
    module.torch_memory_saver = StrictSaver()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    process_saver.cache_clear()
    yield module.torch_memory_saver  # type: ignore[attr-defined]
    process_saver.cache_clear()


def test_a_process_can_have_two(saver: StrictSaver) -> None:
    first = SaverMemory()
    with first.region():
        pass
    second = SaverMemory()
    with second.region(scratch=True):
        pass
    assert saver.regions == [("learner", True), ("learner-scratch", False)]
    second.released = True
    with pytest.raises(MemoryReleased), second.region():
        pass
    with first.region():
        pass


def test_only_a_colocated_learner_on_a_gpu_has_it(saver: StrictSaver) -> None:
    assert type(open_memory(colocated=True, device=torch.device("cpu"))) is Memory
    assert type(open_memory(colocated=False, device=torch.device("cuda", 0))) is Memory
    assert type(open_memory(colocated=True, device=torch.device("cuda", 0))) is SaverMemory


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process_saver.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ImportError, match=r"tidemill\[gpu\]"):
        SaverMemory()
