"""Requests that the proxy of a SGLang server refuses, and those that it passes on; and arguments of the server."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.errors import BadRequest
from tidemill.actors.generate_body import RequestLimits
from tidemill.actors.serving.sglang.arguments import SAME, TRIED, UNTRIED
from tidemill.actors.serving.sglang.server_process import command_line, server_arguments
from tidemill.actors.serving.sglang.validation import responses_in
from tidemill.launch.settings.run_config import RunConfig

LIMITS = RequestLimits(vocab_size=300, max_context=16, encode=lambda text: [5] * len(text))
IDS = {"input_ids": [5, 6, 7]}


def responses(**body: Any) -> int:
    return responses_in(body, LIMITS, max_responses=8)[0]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"input_ids": [5, 300]}, "input_ids: want token ids in 0 .. 299, got 300"),
        ({"input_ids": [[5], [-1]]}, r"input_ids\[1\]: want token ids"),
        ({"input_ids": [5] * 16}, "longer than the model's context length"),
        ({"text": []}, "text: want a string"),
        ({**IDS, "text": "x"}, "want exactly one of input_ids and text, got both"),
        ({**IDS, "rid": ["a"]}, "rid: want one value, or one for each of 1 prompts"),
        ({**IDS, "rid": ""}, "rid: want a string"),
        ({**IDS, "sampling_params": [{}]}, "sampling_params: want one value"),
        ({**IDS, "sampling_params": 5}, "sampling_params: want a map"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "one for each of 2 prompts"),
        ({**IDS, "sampling_params": {"n": 9}}, "at most 8 responses"),
        ({**IDS, "sampling_params": {"n": 0}}, "n: want an integer >= 1"),
        ({**IDS, "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens: want an integer, got 2.5"),
        ({**IDS, "sampling_params": {"temperature": float("nan")}}, r"sampling_params\.temperature: want .*, got nan"),
        ({**IDS, "sampling_params": {"temperature": 1e-300}}, "temperature: want 0 .greedy., or a number >= 1e-06"),
        ({**IDS, "sampling_params": {"min_p": 1e-300}}, "min_p: want 0, or a number of 32 bits, got 1e-300"),
        (
            {**IDS, "sampling_params": {"repetition_penalty": 1e-40}},
            "repetition_penalty: want 0, or a number of 32 bits",
        ),
        ({**IDS, "sampling_params": {"logit_bias": {"5": 1e39}}}, "logit_bias: want a number .*1e"),
        ({**IDS, "sampling_params": {"ignore_eos": 1}}, "ignore_eos: want true or false"),
        ({**IDS, "sampling_params": {"stop": [5]}}, r"sampling_params\.stop\[0\]: want a string, got 5"),
        ({**IDS, "sampling_params": {"stop_regex": "("}}, "stop_regex: want regular expressions"),
        ({**IDS, "sampling_params": {"stop_token_ids": [300]}}, "want token ids in 0 .. 299, got 300"),
        ({**IDS, "sampling_params": {"logit_bias": {"300": 1}}}, "want token ids in 0 .. 299, got '300'"),
        ({**IDS, "sampling_params": {"logit_bias": {"5": float("nan")}}}, "logit_bias: want a number .*nan"),
        ({**IDS, "sampling_params": {"logit_bias": {"5": 10**400}}}, "logit_bias: want a number .*1000"),
        ({**IDS, "sampling_params": {"temperature": 10**400}}, r"sampling_params\.temperature: want .*, got 1000"),
        ({**IDS, "token_ids_logprob": [300]}, "token_ids_logprob: want token ids"),
        ({**IDS, "logprob_start_len": 3}, r"logprob_start_len: want a place in the prompt, 0 .. 2, or -1, got 3"),
        ({**IDS, "logprob_start_len": -2}, "logprob_start_len"),
        ({**IDS, "top_logprobs_num": 301}, "top_logprobs_num: want 0 .. 300"),
        ({**IDS, "stream": "x"}, "stream: want true or false"),
        ({"input_ids": [[5], [6]], "extra_key": ["a"]}, "extra_key: want one value, or one for each of 2 prompts"),
        ({**IDS, "positional_embed_overrides": [1]}, "positional_embed_overrides: not supported"),
    ],
)
def test_what_would_end_a_server_is_refused(body: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest, match=where):
        responses(**body)


def test_what_is_well_is_counted() -> None:
    assert responses(**IDS) == 1
    assert (
        responses(
            **IDS,
            rid="a",
            sampling_params={"n": 3, "temperature": 0, "stop": "x", "top_p": 0.5, "max_new_tokens": None},
        )
        == 3
    )
    assert (
        responses(
            input_ids=[[5], [6, 7]],
            rid=["a", "b"],
            sampling_params=[{"n": 2}, {}],
            logprob_start_len=[0, 1],
            extra_key="k",
        )
        == 3
    )
    assert responses(text=["ab", "c"], sampling_params={"n": 2}, unknown_field=1) == 4
    assert (
        responses(
            **IDS,
            sampling_params={"logit_bias": {"299": 1.5}, "stop_token_ids": [0], "stop_regex": ["a+"], "unknown": [5]},
        )
        == 1
    )


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (EngineConfig(), "bfloat16"),
        (EngineConfig(device="cpu"), "float32"),
        (EngineConfig(sglang=SglangConfig(arguments={"device": "cpu"})), "float32"),
        (EngineConfig(dtype="float32"), "float32"),
        (EngineConfig(dtype="bfloat16", device="cpu"), "bfloat16"),
        (EngineConfig(dtype="float32", sglang=SglangConfig(arguments={"dtype": "half"})), "half"),
    ],
)
def test_the_dtype_auto_follows_the_servers_device(config: EngineConfig, dtype: str) -> None:
    assert server_arguments(config)["dtype"] == dtype


def test_arguments_become_words_that_sglang_reads() -> None:
    arguments = {
        "tp_size": 2,
        "enable_lora": True,
        "disable_radix_cache": False,
        "lora_paths": ["a=/a", {"lora_name": "b"}],
        "cuda_graph_bs": [],
        "json_model_override_args": {"rope_scaling": {"factor": 2.0, "on": True, "none": None}},
        "preferred_sampling_params": '{"top_k": 5}',
    }
    assert command_line("python", Path("m"), 1, arguments)[11:] == [
        *("--tp-size", "2", "--enable-lora", "--lora-paths", "a=/a", '{"lora_name": "b"}'),
        *("--json-model-override-args", '{"rope_scaling": {"factor": 2.0, "on": true, "none": null}}'),
        *("--preferred-sampling-params", '{"top_k": 5}'),
    ]
    with refusal(ValueError, place=re.compile(r"arguments\.model_path$")):
        command_line("python", Path("m"), 1, {"model_path": "x"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"quantization": "fp8"},
            "quantization: not passed to SGLang: a push sends the learner's tensors, in their names and data type",
        ),
        ({"kv-cache-dtype": "fp8_e5m2"}, "kv-cache-dtype: not passed to SGLang: a push sends"),
        (
            {"speculative_algorithm": "EAGLE"},
            "speculative_algorithm: not passed to SGLang: a push does not reach the draft model",
        ),
        (
            {"speculative-num-steps": 3},
            "speculative-num-steps: not passed to SGLang: a push does not reach the draft model",
        ),
        ({"enable_lora": True}, "enable_lora: not passed to SGLang: a push sends merged weights"),
        ({"lora_target_modules": ["all"]}, "lora_target_modules: not passed to SGLang: a push sends merged weights"),
        ({"modelopt_checkpoint_save_path": "x"}, "not passed to SGLang: a push sends the learner's tensors"),
        ({"num_continuous_decode_steps": 2}, "num_continuous_decode_steps: not passed to SGLang: it has no effect"),
        ({"cuda-graph-max-bs-decode": 6}, "cuda-graph-max-bs-decode: not passed to SGLang: its effect has not been"),
        ({"pp": 2}, "pp: not passed to SGLang: servers of several pipeline stages or replicas have not been tried"),
        (
            {"reasoning_parser": "qwen3"},
            "reasoning_parser: not passed to SGLang: it has no effect: the engine renders and parses chats itself",
        ),
        (
            {"config": "/some/file"},
            "config: not passed to SGLang: the arguments in it would not be checked; give them by name; remove it",
        ),
        ({"mem_fraction_statik": 0.5}, "got 0.5; did you mean mem_fraction_static?"),
        (
            {"plugin": "a.b"},
            "got 'a.b'; remove it, or start a server with it yourself and set engine.sglang.url (docs/sglang.md)",
        ),
    ],
)
def test_arguments_that_have_not_been_tried_are_refused_when_the_file_is_read(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"engine\.sglang\.arguments\." + f".*{re.escape(message)}"):
        RunConfig(run="r", engine=EngineConfig(kind="sglang", sglang=SglangConfig(arguments=arguments)))


def test_arguments_that_are_tried_and_those_left_out_by_another_file_are_taken() -> None:
    arguments = {**TRIED, "tp-size": 2, "tp": 2, "quantization": None, "enable_lora": False}
    assert RunConfig(run="r", engine=EngineConfig(sglang=SglangConfig(arguments=arguments)))
    assert not {*TRIED, *SAME} & {*UNTRIED}
