"""References of ``tests.bench.rewards``: each reward from its published definition in a few lines, or by the library
that defines it.

They are plain on purpose: no limits, no odd notations, no refusals. A reward is compared with its own one in speed and
results.
"""

import logging
import re
import string
import subprocess
import sys
from collections import Counter
from typing import Any

from tidemill.bus.wire.messages import score_of
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest


def dapo(request: RewardRequest) -> float:
    """DAPO (arXiv 2503.14476): the last ``Answer: ...`` of the last 300 characters is the label as text, 1 or -1."""
    found = re.findall(r"(?i)answer\s*:\s*([^\n]+)", request.response[-300:])
    return 1.0 if found and found[-1].strip() == str(request.label) else -1.0


def exact(request: RewardRequest) -> float:
    """Text without white space around it, or one of several."""
    labels = request.label if isinstance(request.label, list) else [request.label]
    return float(any(request.response.strip() == str(label).strip() for label in labels))


def f1(request: RewardRequest) -> float:
    """SQuAD (arXiv 1606.05250): lower case, no punctuation, no articles; F1 of the words."""
    got, want = (_squad_words(str(text)) for text in (request.response, request.label))
    common = sum((Counter(got) & Counter(want)).values())
    return 2 * common / (len(got) + len(want)) if common else 0.0


def _squad_words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def format_tags(request: RewardRequest) -> float:
    """DeepSeek-R1 (arXiv 2501.12948): thoughts and answer between their tags, nothing outside of them."""
    found = re.fullmatch(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", request.response, re.DOTALL)
    return float(
        found is not None and all(part.strip() and not re.search("</?(think|answer)>", part) for part in found.groups())
    )


def gpqa(request: RewardRequest) -> float:
    """GPQA (arXiv 2311.12022): the letter behind "answer is", in brackets."""
    found = re.search(r"answer is \((.)\)", request.response, re.IGNORECASE)
    return float(found is not None and found[1] == request.label)


def gsm8k(request: RewardRequest) -> float:
    """GSM8K (arXiv 2110.14168): the number after ``####`` without commas is the label's."""
    found = re.search(r"#### (-?[0-9.,]+)", request.response)
    return float(found is not None and found[1].replace(",", "") == str(request.label).replace(",", ""))


def ifeval(request: RewardRequest) -> float:
    """Three instructions of IFEval (arXiv 2311.07911), as ``IFEVAL_RULES`` of the benchmark names them."""
    text, (_, words, keyword) = request.response, request.metadata["kwargs"]
    followed = "," not in text and len(re.findall(r"\w+", text)) < words["num_words"]
    return float(followed and len(re.findall(keyword["keyword"], text, re.IGNORECASE)) >= keyword["frequency"])


def ifbench(request: RewardRequest) -> float:
    """Three instructions of IFBench (arXiv 2507.02833), as ``IFBENCH_RULES`` of the benchmark names them."""
    text, (words, numbers, repeats) = request.response, request.metadata["kwargs"]
    if not words["min_words"] <= len(re.findall(r"\w+", text)) <= words["max_words"]:
        return 0.0
    plain = text.translate(str.maketrans("", "", string.punctuation))
    if len(re.findall(r"\d+", plain)) != numbers["N"]:
        return 0.0
    return float(max(Counter(plain.lower().split()).values()) <= repeats["small_n"])


def overlong(request: RewardRequest, *, max_tokens: int, buffer: int) -> float:
    """DAPO, equation 13."""
    if request.sampled_length <= max_tokens - buffer:
        return 0.0
    return ((max_tokens - buffer) - request.sampled_length) / buffer if request.sampled_length <= max_tokens else -1.0


def regex(request: RewardRequest, *, pattern: str) -> float:
    """The last match of Python's own ``re`` is the label."""
    found = re.findall(pattern, request.response)
    return float(bool(found) and found[-1] == str(request.label))


def relative_length(request: GroupRequest) -> list[float]:
    """Kimi k1.5 (arXiv 2501.12599), 2.3.3: 0.5 - (length - shortest) / (longest - shortest) more; for wrong ones at
    most 0 of that.
    """
    lengths, found = [sample.sampled_length for sample in request.samples], []
    for length, reward in zip(lengths, request.rewards, strict=True):
        bonus = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths)) if max(lengths) > min(lengths) else 0.0
        found.append(score_of(reward) + (bonus if score_of(reward) == 1.0 else min(0.0, bonus)))
    return found


def repetition(request: RewardRequest, *, ngram: int) -> float:
    """Yeo et al. 2025 (arXiv 2502.03373): minus the share of n-grams that are repeated."""
    words = request.response.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    return len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0


def math_verify(request: RewardRequest) -> float:
    """The library math-verify, as its documentation calls it, without its own time limit."""
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    gold = library.parse(f"${request.label}$", parsing_timeout=None)
    answer = library.parse(request.response, parsing_timeout=None)
    return float(library.verify(gold, answer, timeout_seconds=None))


def code(request: RewardRequest) -> float:
    """The block of Python in an interpreter of its own, without any limit: standard output for each standard input."""
    program = request.response.rpartition("```python\n")[2].partition("```")[0]
    for given, want in zip(request.label["inputs"], request.label["outputs"], strict=True):
        ended = subprocess.run([sys.executable, "-I", "-c", program], input=given, capture_output=True, text=True)
        if ended.returncode or ended.stdout.strip() != want:
            return 0.0
    return 1.0


def score(result: Any) -> float | list[float]:
    """Return the number, or the numbers of a group, in the result of a reward."""
    return [score_of(one) for one in result] if isinstance(result, list) else score_of(result)
