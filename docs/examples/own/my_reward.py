"""Two rewards of one's own: one that looks at the text, and one that asks a judge over HTTP."""

import aiohttp

from tidemill.rewards import RewardRequest


def contains(request: RewardRequest, *, brevity: float = 0.1) -> dict[str, float]:
    """1 when the label occurs in the response, and up to ``brevity`` more for a short one."""
    right = float(str(request.label) in request.response)
    short = 1 / (1 + len(request.response) / 100)
    return {"score": right + brevity * short, "right": right, "short": short}


async def judged(request: RewardRequest, *, url: str) -> float:
    """The number that a judge at ``url`` answers with."""
    async with aiohttp.ClientSession() as session:
        async with session.post(
            url, json={"question": request.prompt, "answer": request.response, "gold": request.label}
        ) as answer:
            answer.raise_for_status()
            return float((await answer.json())["score"])
