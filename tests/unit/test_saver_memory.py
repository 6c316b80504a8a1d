"""Memory of a colocated learner on CUDA, over a torch_memory_saver whose mode, as that of the real one, is set before its first use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from learner.megatron.memory import KEPT, SCRATCH, PlainMemory, SaverMemory, open_memory


class Saver:
    """The singleton of torch_memory_saver 0.0.10: its first use makes the implementation and deletes the arguments for it."""

    def __init__(self) -> None:
        self._impl: object | None = None
        self._impl_ctor_kwargs: dict[str, str] = {}
        self.regions: list[tuple[str, bool]] = []

    @property
    def hook_mode(self) -> str:
        raise AttributeError("hook_mode can only be set")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        assert self._impl_ctor_kwargs is not None
        self._impl_ctor_kwargs["hook_mode"] = mode

    @contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        if self._impl is None:
            self._impl = dict(self._impl_ctor_kwargs)
            del self._impl_ctor_kwargs
        self.regions.append((tag, enable_cpu_backup))
        yield


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    module, made = ModuleType("torch_memory_saver"), Saver()
    module.torch_memory_saver = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    return made


def test_a_process_opens_it_again_after_its_first_use(saver: Saver) -> None:
    for _ in range(2):
        memory = SaverMemory()
        with memory.region():
            pass
        with memory.region(scratch=True):
            pass
    assert saver._impl == {"hook_mode": "torch"}
    assert saver.regions == [(KEPT, True), (SCRATCH, False)] * 2


def test_without_a_gpu_nothing_is_saved(saver: Saver) -> None:
    assert type(open_memory(colocated=True, device=torch.device("cpu"))) is PlainMemory
    assert type(open_memory(colocated=False, device=torch.device("cuda", 0))) is PlainMemory
    assert type(open_memory(colocated=True, device=torch.device("cuda", 0))) is SaverMemory
