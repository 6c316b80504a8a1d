"""Generate functions as users of slime write them: two turns with a tool's answer in between."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEEN = []
"""Samples as the functions made them, for the tests."""


async def by_ids(args, sample: Sample, sampling_params) -> Sample:
    """Tokens in, tokens out."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = list(state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
    for turn in range(2):
        async with state.semaphore:
            output = await post(
                url, {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
            )
        entries = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if not turn:
            result = state.tokenizer(" The tool says 5.", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=result, trainable=False, text=" The tool says 5.")
    sample.reward = {"score": 0.5, "form": 1.0}
    SEEN.append(sample)
    return sample


async def by_text(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    """Text in, text out, as slime's search-r1 does; the reward is the run's."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    response = ""
    for turn in range(2):
        output = await post(
            url, {"text": sample.prompt + response, "sampling_params": {**sampling_params, "max_new_tokens": 6}}
        )
        response += output["text"] + ("" if turn else " The tool says 5.")
    sample.response = response
    sample.status = Sample.Status.COMPLETED
    sample.metadata["evaluation"] = evaluation
    SEEN.append(sample)
    return sample


async def several(args, sample: Sample, sampling_params):
    """Two samples of one prompt, as a fan-out."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for _ in range(2):
        await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    return [Sample(reward=0.25), Sample(reward=0.5)]


async def aborted(args, sample: Sample, sampling_params):
    sample.status = Sample.Status.ABORTED
    return sample


async def wrong_key(args, sample: Sample, sampling_params):
    host = args.sglang_router_ip.partition("@")[2]
    await post(f"http://{host}:{args.sglang_router_port}/generate", {"text": sample.prompt})
    return sample


def plain(args, sample, sampling_params):
    return sample


async def short(args, sample):
    return sample
