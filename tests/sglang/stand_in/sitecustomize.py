"""Stand-ins, for tests on machines without a GPU.

torchvision from PyPI is built for CUDA and cannot register its operators here; SGLang needs only its transforms.
SGLang's buffer of the experts of tokens is pinned by CUDA; here it is plain memory. Python runs this file at start when
its folder is on PYTHONPATH.

With ``SLOWED_WHILE=FILE`` in the environment, each decoding step takes ``STEP_S`` more while there is the file: a
command of a test comes in the middle of a response.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from typing import Any

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))


class _PlainBuffers(importlib.abc.MetaPathFinder):
    """Has SGLang's table of allocators give plain memory on CPUs, once its module is loaded."""

    NAME = "sglang.srt.mem_cache.pool_host.common"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                torch = module.torch
                module.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, device, **pinned: torch.empty(
                    size, dtype=dtype, device=device
                )

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


STEP_S = 0.05
SLOWED_WHILE = os.environ.get("SLOWED_WHILE", "")


class _SlowDecoding(importlib.abc.MetaPathFinder):
    """Has SGLang's scheduler decode slowly while there is the file."""

    NAME = "sglang.srt.managers.scheduler"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                run_batch = module.Scheduler.run_batch

                def run_slowly(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
                    if batch.forward_mode.is_decode() and os.path.exists(SLOWED_WHILE):
                        time.sleep(STEP_S)
                    return run_batch(self, batch, *args, **options)

                module.Scheduler.run_batch = run_slowly

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _PlainBuffers())
if SLOWED_WHILE:
    sys.meta_path.insert(0, _SlowDecoding())
