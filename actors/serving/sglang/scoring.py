"""Outputs of the modules of SGLang's model for single prompts, under names that other implementations of the model share.

    prompt --/generate--> a server with one rank, started here --forward hooks (``inside.tidemill_module_outputs``)--> a file for each pass

A server computes a prompt in one pass: without a cache of prefixes, graphs and chunks. Shape letters: T = tokens of one prompt.
"""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from actors.config import EngineConfig
from actors.errors import BadRequest, EngineFailed, UnsupportedModel
from actors.serving.sglang.inside import tidemill_module_outputs as hooks
from actors.serving.sglang.releases import release_of
from actors.serving.sglang.server_process import ServerProcess

ONE_PASS: Mapping[str, object] = {
    "chunked_prefill_size": -1,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
}
"""Arguments with which each prompt is computed in a pass of its own, by calls of the modules."""
PARALLEL = ("tp", "tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size", "dp_size", "data_parallel_size", "ep_size", "ep")
"""Arguments with which a rank computes a part of an output."""
ANSWER_S = 600.0
"""Seconds for a prompt."""


def score_directory(directory: Path, prompts: Sequence[Sequence[int]], names: str, config: EngineConfig) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T, size].

    ``config``: how the server is started. ``log_probs`` has one value for each token but the first, at temperature 1. Raises EngineFailed
    for a server that does not start, UnsupportedModel for a prompt or a model that it does not take, ValueError for arguments of several
    ranks and for a server that runs already.
    """
    for name in PARALLEL:
        if config.sglang.arguments.get(name, 1) != 1:
            cure = "each rank computes a part; give a configuration without it"
            raise ValueError(f"engine.sglang.arguments.{name}: want 1, got {config.sglang.arguments[name]!r}; {cure}")
    if config.sglang.url:
        raise ValueError(f"engine.sglang.url: want none, a server is started; got {config.sglang.url}; --engine asks a running one")
    outputs = asyncio.run(_scored(directory, prompts, config))
    return {name: value for name, value in outputs.items() if fnmatchcase(name.split(".", 1)[1], names)}


async def _scored(directory: Path, prompts: Sequence[Sequence[int]], config: EngineConfig) -> dict[str, NDArray[np.float32]]:
    passes = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tidemill-passes-"))
    found: dict[str, NDArray[np.float32]] = {}
    try:
        server = await ServerProcess.open(directory, _hooked(config, passes))
        try:
            release_of(server.api.url, (await server.api.call("GET", "/server_info"))["version"])
            for number, tokens in enumerate(prompts):
                outputs = await _of_prompt(server, passes, tokens, f"prompt {number}")
                found |= {f"{number}.{name}": value for name, value in outputs.items()}
        finally:
            await server.close()
    finally:
        await asyncio.to_thread(shutil.rmtree, passes, ignore_errors=True)
    return found


def _hooked(config: EngineConfig, passes: Path) -> EngineConfig:
    """Return the configuration of a server whose modules' outputs are written to ``passes``."""
    settings, file = config.sglang, Path(hooks.__file__)
    hook = {
        "name": "outputs",
        "target_modules": hooks.PATTERNS,
        "hook_factory": f"{file.stem}:{hooks.hook.__name__}",
        "config": {"directory": str(passes)},
    }
    given = settings.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, (str(file.parent), given)))
    arguments = {**settings.arguments, **ONE_PASS, "forward_hooks": json.dumps([hook]), "dtype": config.dtype}
    return replace(config, sglang=replace(settings, arguments=arguments, environment=settings.environment | {"PYTHONPATH": path}))


async def _of_prompt(server: ServerProcess, passes: Path, tokens: Sequence[int], name: str) -> dict[str, NDArray[np.float32]]:
    """Return the outputs for one prompt, log-probs included."""
    _taken(passes)  # those of health checks
    body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True}
    try:
        answer = await server.api.call("POST", "/generate", body | {"logprob_start_len": 0}, timeout_s=ANSWER_S)
        log_probs = [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]
    except BadRequest as refused:
        raise UnsupportedModel(name, refused.reason) from None
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFailed(server.api.url, f"want log-probs of {name}, got {error!r}") from None
    passed = _taken(passes)
    whole = [outputs for outputs in passed if all(len(value) == len(tokens) for value in outputs.values())]
    if len(whole) != 1 or not whole[0]:
        got = f"{len(passed)} passes, {len(whole)} of them with {len(tokens)} tokens"
        raise UnsupportedModel(name, f"want one pass of the modules {', '.join(hooks.PATTERNS[:3])}, ... in SGLang, got {got}")
    values = {place.split(".", 1)[1]: np.asarray(value, np.float32) for place, value in sorted(whole[0].items())}
    return values | {"log_probs": np.array(log_probs, np.float32)[:, None]}


def _taken(passes: Path) -> list[dict[str, NDArray[np.float32]]]:
    """Return the outputs of the passes that were written since the last call."""
    files = sorted(passes.glob("*.safetensors"))
    outputs = [load_file(file) for file in files]
    for file in files:
        file.unlink()
    return outputs
