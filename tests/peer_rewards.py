"""Reward functions as they are written for slime, verl and TRL."""

from typing import Any

from tests.waits import turn


async def slime_rm(args: Any, sample: Any, **kwargs: Any) -> float:
    await turn()
    return (
        args.scale * float(sample.label in sample.response)
        + 0.1 * (sample.status.value == "truncated")
        + len(sample.tokens) / 1000
    )


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, strict: bool = False
) -> dict[str, Any]:
    correct = solution_str.strip() == ground_truth if strict else ground_truth in solution_str
    return {
        "score": 2.0 * correct,
        "acc": correct,
        "pred": solution_str,
        "from": data_source,
        "hard": extra_info["level"],
    }


def accuracy(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    assert len(kwargs["prompts"]) == len(kwargs["level"]) == len(texts) == 1
    more = kwargs["level"][0] + len(kwargs["completion_ids"][0]) / 100
    return [float(wanted in text) + more for text, wanted in zip(texts, solution, strict=True)]


def too_many(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0, 2.0]


def no_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"acc": 1.0}


def broken(args: Any, sample: Any) -> float:
    return float(args.rm_url)


def plain(request: Any) -> float:
    return 1.0


not_callable = 3
