"""A generate function of slime: two turns with a tool's answer in between; the reward is the share of letters in the
model's text.
"""

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Ask twice."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    context, said = sample.prompt, ""
    for result in (" The tool says 5.", ""):
        output = await post(url, {"text": context, "sampling_params": sampling_params})
        said += output["text"]
        context += output["text"] + result
    sample.response = said
    sample.reward = sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))
    sample.status = Sample.Status.COMPLETED
    return sample
