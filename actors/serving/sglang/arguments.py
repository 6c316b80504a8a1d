"""Arguments of SGLang servers by name (``engine.sglang.arguments``): which are passed on, and why others are not; and
SGLang's releases: which are supported, and how they differ (``docs/sglang.md``). Only here are their numbers.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from tidemill.actors.errors import EngineFailed
from tidemill.bus.wire.json_object import JsonMapping

TRIED: Mapping[str, str] = {
    "device": "cpu: the server computes on the CPU",
    "dtype": "data type of weights and activations, in place of engine.dtype",
    "tp_size": "ranks that divide each layer, one device each",
    "attention_backend": "kernels of attention",
    "sampling_backend": "kernels of sampling",
    "mem_fraction_static": "share of the memory for weights, keys and values",
    "max_total_tokens": "tokens with keys and values at once, in place of engine.kv_tokens",
    "max_running_requests": "responses decoded together, in place of engine.max_running",
    "context_length": "tokens of prompt and response, in place of engine.max_context",
    "chunked_prefill_size": "prompt tokens of a forward pass",
    "max_prefill_tokens": "prompt tokens of a batch",
    "schedule_policy": "order of the requests that wait",
    "schedule_conservativeness": "room that the scheduler keeps for the growth of responses",
    "max_queued_requests": "requests that wait, behind which further ones are refused",
    "stream_interval": "tokens between two parts of a streamed response",
    "page_size": "tokens of a page of keys and values",
    "decode_log_interval": "passes between two lines of the log on the speed",
    "disable_radix_cache": "no prompt shares the keys and values of another",
    "disable_cuda_graph": "no CUDA graphs",
    "disable_overlap_schedule": "scheduling between the forward passes, not beside them",
    "skip_server_warmup": "no first request of the server's own",
    "sleep_on_idle": "an idle server takes no CPU",
    "log_level": "lines of the server's log",
    "random_seed": "seed of the server's sampling",
    "watchdog_timeout": "seconds of a forward pass after which the server ends itself",
    "enable_memory_saver": "memory that a colocated server releases for each step",
    "enable_return_routed_experts": "the experts of each token, for learner.routing_replay: rollout",
    "api_key": "key of the server, in place of a generated one",
}
"""Arguments that are passed on, and their effects; ``tests/sglang/test_sglang_own_server.py`` tries them."""
SAME = {"tensor_parallel_size": "tp_size", "tp": "tp_size"}
"""Other names of these."""
ELSEWHERE = ("model_path", "host", "port", "weight_version", "base_gpu_id", "gpu_id_step")
"""Arguments that the engine sets, and refuses with reasons of their own."""

_QUANTISED = "a push sends the learner's tensors, in their names and data type, which a quantised server does not have"
_SPECULATIVE = (
    "a push does not reach the draft model, and the log-probs of its tokens have not been compared with the learner's"
)
_ADAPTERS = "a push sends merged weights: adapters of the server's would be added to them"
_RANKS = (
    "servers of several pipeline stages or replicas have not been tried with pushes; start more engines (up.engines)"
)
_CHATS = "it has no effect: the engine renders and parses chats itself, and asks the server for tokens alone"
_NO_EFFECT = "it has no effect: no part of SGLang's server reads it"
_GRAPHS = "its effect has not been tried: there are no CUDA graphs on a CPU"
_FILE = "the arguments in it would not be checked; give them by name"
UNTRIED: Mapping[str, str] = {
    **dict.fromkeys(
        ("quantization", "quantization_param_path", "torchao_config", "kv_cache_dtype", "load_format"), _QUANTISED
    ),
    **dict.fromkeys(("modelopt_quant", "fp8_gemm_runner_backend", "enable_fp32_lm_head"), _QUANTISED),
    **dict.fromkeys(("enable_lora", "lora_paths", "max_loras_per_batch", "lora_backend", "max_lora_rank"), _ADAPTERS),
    **dict.fromkeys(
        ("dp_size", "data_parallel_size", "dp", "pp_size", "pipeline_parallel_size", "pp", "enable_dp_attention"),
        _RANKS,
    ),
    **dict.fromkeys(
        ("reasoning_parser", "tool_call_parser", "chat_template", "completion_template", "served_model_name"), _CHATS
    ),
    "num_continuous_decode_steps": _NO_EFFECT,
    **dict.fromkeys(("cuda_graph_max_bs", "cuda_graph_max_bs_decode", "cuda_graph_bs"), _GRAPHS),
    "config": _FILE,
}
"""Reasons against some of the others."""
FAMILIES: Mapping[str, str] = {"speculative_": _SPECULATIVE, "lora_": _ADAPTERS, "modelopt_": _QUANTISED}
"""Reasons by the beginning of a name."""
OWN_SERVER = "start a server with it yourself and set engine.sglang.url (docs/sglang.md)"


def refuse_untried(arguments: JsonMapping) -> None:
    """Raise ValueError for an argument that is not known to work with pushes. Null and false pass nothing on."""
    for argument, value in arguments.items():
        name = argument.replace("-", "_")
        if value is None or value is False or SAME.get(name, name) in TRIED or name in ELSEWHERE:
            continue
        if reason := UNTRIED.get(name) or next((why for start, why in FAMILIES.items() if name.startswith(start)), ""):
            raise ValueError(f"engine.sglang.arguments.{argument}: not passed to SGLang: {reason}; remove it")
        near = get_close_matches(name, [*TRIED, *SAME], 1, 0.8)
        cure = f"did you mean {near[0]}?" if near else f"remove it, or {OWN_SERVER}"
        want = f"an argument that has been tried ({', '.join(TRIED)})"
        raise ValueError(f"engine.sglang.arguments.{argument}: want {want}, got {value!r}; {cure}")


OLDEST = (0, 5, 21)
"""First release with ``begin_weight_update``; a paused one flushes its cache with requests in its queue."""
NEWEST = (0, 5, 23)
"""Release that the tests run."""
CPU_CHECKSUMS = (0, 5, 23)
"""First release with /weights_checker on CPU."""

Release = tuple[int, int, int]


def release_of(engine: str, said: object) -> Release:
    """Return the release that ``version`` of /server_info names. Raises EngineFailed unless it is OLDEST or newer."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(said))
    if match is None:
        raise EngineFailed(
            engine, f"version in /server_info: want a release of SGLang, like {written(NEWEST)}, got {said!r}"
        )
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise EngineFailed(
            engine,
            f"SGLang's release: want >= {written(OLDEST)}, got {said}; install a newer one for engine.sglang.python, "
            "or start the server at engine.sglang.url with one",
        )
    return version


def written(version: Release) -> str:
    """Return a release as text, like ``0.5.21``."""
    return ".".join(map(str, version))
