"""Stand-ins, for tests on machines without a GPU.

torchvision from PyPI is built for CUDA and cannot register its operators here; SGLang needs only its transforms. SGLang's buffer of the
experts of tokens is pinned by CUDA; here it is plain memory. Python runs this file at start when its folder is on PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import sys
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
                module.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, device, **pinned: torch.empty(size, dtype=dtype, device=device)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _PlainBuffers())
