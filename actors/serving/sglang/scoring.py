"""Outputs of the modules of SGLang's model for single prompts, under names that other implementations of the model
share.

    prompt --/generate--> a server with one rank --forward hooks (``inside``)--> a file for each pass

A server computes a prompt in one pass, in which every module is called once. Shape letters: T = tokens of one prompt.
"""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tidemill.actors.config import OF_RANKS, EngineConfig
from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, UnsupportedModel
from tidemill.actors.serving.sglang.arguments import release_of
from tidemill.actors.serving.sglang.inside import tidemill_module_outputs as hooks
from tidemill.actors.serving.sglang.server_process import INFO_S, ServerProcess, server_arguments
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import language_values

Outputs = dict[str, NDArray[np.float32]]
"""``<module>`` or ``<prompt>.<module>`` -> [T, size], in the order of computation."""

ONE_PASS: Mapping[str, object] = {
    "chunked_prefill_size": -1,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
}
"""Arguments with which each prompt is computed in a pass of its own, by calls of the modules."""
GRAPHS = "cuda_graph_"
"""Prefix of arguments about graphs, in which no module is called; they change no number, and are left out."""
REFUSED = {
    "allow_auto_truncate": "a prompt would be cut off",
    "disaggregation_mode": "prompts would be computed by another server",
    "enable_pdmux": "modules would be called in parts",
    "enable_two_batch_overlap": "modules would be called in parts",
    "forward_hooks": "the outputs are written by hooks of their own",
    "speculative_algorithm": "the outputs of the draft model would be among them",
}
"""Arguments with which the outputs would be others, and why."""
ONE_RANK = "each rank computes a part of the outputs"
WITHOUT = "give a configuration without it"
ANSWER_S = 600.0
"""Seconds for a prompt."""


def score_directory(
    directory: Path, prompts: Sequence[Sequence[int]], names: str, config: EngineConfig
) -> tuple[Outputs, str]:
    """Return the outputs of the modules with matching names, ``<prompt>.<module>`` -> [T, size], and the dtype in which
    they were computed.

    ``config``: how the server is started. ``log_probs`` has one value for each token but the first, at temperature 1.
    Raises EngineFailed and EngineUnavailable for a server that does not start or answer, UnsupportedModel for a prompt
    or a model that it does not take, ValueError for settings with which it would not compute them all in one process.
    """
    _refuse_settings(config)
    _refuse_unknown_tokens(directory, prompts)
    outputs = asyncio.run(_scored(directory, prompts, config))
    matching = {name: value for name, value in outputs.items() if fnmatchcase(name.split(".", 1)[1], names)}
    return matching, str(server_arguments(config)["dtype"])


def _refuse_settings(config: EngineConfig) -> None:
    settings = config.sglang
    if settings.url:
        raise ValueError(
            f"engine.sglang.url: want none, a server is started; got {settings.url}; --engine asks a running one"
        )
    _refuse_values(settings.argument, "engine.sglang.arguments.{}")


def _refuse_values(value_of: Callable[..., object], where: str) -> None:
    """Raise ValueError for arguments with which the outputs would be others. ``where``: their place, for ``{}``."""
    for names in OF_RANKS:
        if (ranks := value_of(*names)) not in (None, 1):
            raise ValueError(f"{where.format(names[0])}: want 1, got {ranks!r}: {ONE_RANK}; {WITHOUT}")
    for name, reason in REFUSED.items():
        if (value := value_of(name)) not in (None, False, "null"):
            raise ValueError(f"{where.format(name)}: want none, got {value!r}: {reason}; {WITHOUT}")


def _refuse_unknown_tokens(directory: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Raise UnsupportedModel for a prompt with a token that the model does not have: SGLang would end."""
    size = language_values(json.loads((directory / "config.json").read_text(encoding="utf-8"))).get("vocab_size")
    for number, tokens in enumerate(prompts):
        if isinstance(size, int) and max(tokens) >= size:
            raise UnsupportedModel(f"prompt {number}", f"want tokens below {size}, got {max(tokens)}")


async def _scored(directory: Path, prompts: Sequence[Sequence[int]], config: EngineConfig) -> Outputs:
    passes = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="tidemill-passes-"))
    all_outputs: Outputs = {}
    try:
        server = await ServerProcess.open(directory, _hooked(config, passes))
        try:
            _refuse_server(server.api.url, await server.api.call("GET", "/server_info", timeout_s=INFO_S))
            for number, tokens in enumerate(prompts):
                outputs = await _of_prompt(server, passes, tokens, f"prompt {number}")
                all_outputs |= {f"{number}.{name}": value for name, value in outputs.items()}
        finally:
            await server.close()
    finally:
        await asyncio.to_thread(shutil.rmtree, passes, ignore_errors=True)
    return all_outputs


def _hooked(config: EngineConfig, passes: Path) -> EngineConfig:
    """Return the configuration of a server that writes the outputs of its modules to ``passes``."""
    settings, file = config.sglang, Path(hooks.__file__)
    hook = {
        "name": "outputs",
        "target_modules": hooks.PATTERNS,
        "hook_factory": f"{file.stem}:{hooks.hook.__name__}",
        "config": {"directory": str(passes)},
    }
    path = settings.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, (str(file.parent), path)))
    arguments = {name.replace("-", "_"): value for name, value in settings.arguments.items()}
    arguments = {name: value for name, value in arguments.items() if not name.startswith(GRAPHS)}
    arguments |= {**ONE_PASS, "forward_hooks": json.dumps([hook])}
    return replace(
        config, sglang=replace(settings, arguments=arguments, environment=settings.environment | {"PYTHONPATH": path})
    )


def _refuse_server(url: str, info: JsonMapping) -> None:
    """Raise EngineFailed for an unsupported release, ValueError for refused settings of SGLang's own file."""
    release_of(url, info["version"])
    own_settings = {name: value for name, value in info.items() if name != "forward_hooks"}
    _refuse_values(lambda name, *_: own_settings.get(name), "{} of the server")


async def _of_prompt(server: ServerProcess, passes: Path, tokens: Sequence[int], name: str) -> Outputs:
    """Return the outputs for one prompt, ``<module>`` -> [T, size], log-probs included."""
    _taken(passes)  # requests of health checks
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
    }
    try:
        answer = await server.api.call("POST", "/generate", body | {"logprob_start_len": 0}, timeout_s=ANSWER_S)
        log_probs = [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]
    except BadRequest as refused:
        raise UnsupportedModel(name, refused.reason) from None
    except EngineError as error:
        raise await server.cause_of(error) from None
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFailed(server.api.url, f"want log-probs of {name}, got {error!r}") from None
    passed = _taken(passes)
    complete_passes = [outputs for outputs in passed if all(len(value) == len(tokens) for value in outputs.values())]
    if len(complete_passes) != 1 or not complete_passes[0]:
        got = f"{len(passed)} passes, {len(complete_passes)} of them with {len(tokens)} tokens"
        raise UnsupportedModel(
            name, f"want one pass of the modules {', '.join(hooks.PATTERNS[:3])}, ... in SGLang, got {got}"
        )
    values = {
        place.split(".", 1)[1]: np.asarray(value, np.float32) for place, value in sorted(complete_passes[0].items())
    }
    return values | {"log_probs": np.array(log_probs, np.float32)[:, None]}


def _taken(passes: Path) -> list[Outputs]:
    """Return the outputs of each pass that was written since the last call, ``<place>.<module>`` -> [T, size]."""
    files = sorted(passes.glob("*.safetensors"))
    outputs = [load_file(file) for file in files]
    for file in files:
        file.unlink()
    return outputs
