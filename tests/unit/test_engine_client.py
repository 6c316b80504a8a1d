"""Client results for answers of an engine in which nothing was generated."""

import numpy as np

from tidemill.actors.engines.engine_client import read_answer
from tidemill.actors.engines.port import Generation
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.bus.wire.messages import Sampling, Span

NOT_BEGUN = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "id": "one",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "0",
        "e2e_latency": 0.2,
        "input_token_logprobs": [],
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
        "completion_tokens": 0,
    },
}
"""Answer of SGLang (0.5.23) to a request that was aborted while it waited there."""


def test_a_request_aborted_before_its_start_is_aborted() -> None:
    made = read_answer("http://e", NOT_BEGUN, Sampling(), None)
    assert (made.finish, len(made.tokens), made.prompt_tokens) == ("abort", 0, 0)


def test_a_partial_is_kept_when_its_continuation_does_not_start() -> None:
    begun = Generation(
        id="0",
        tokens=np.array([4, 5], np.int32),
        log_probs=np.array([-1.0, -2.0], np.float32),
        spans=(Span(version=3, num_tokens=2),),
        finish="abort",
        text="ab",
        prompt_tokens=7,
    )
    made = read_answer("http://e", NOT_BEGUN, Sampling(), begun)
    assert (made.finish, made.tokens.tolist(), made.spans) == ("abort", [4, 5], begun.spans)


def test_the_openai_answer_to_a_request_that_did_not_start() -> None:
    parsed = openai_api.parse({"messages": [{"role": "user", "content": "x"}]}, chat=True)
    answer = ResponseBuilder(parsed, chat_id="i", model="m", created=0, piece=None).whole([NOT_BEGUN])
    assert answer["usage"]["total_tokens"] == 0
