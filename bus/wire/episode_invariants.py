"""Invariants of samples with several token sequences, of turns, and of the rollout and budget of a task (``docs/wire.md``)."""

import math

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.config import RUN_NAME
from tidemill.bus.errors import WireError
from tidemill.bus.wire.budget import Budget
from tidemill.bus.wire.episodes import Turns
from tidemill.bus.wire.messages import Plan, Sample, Task
from tidemill.bus.wire.template_args import check_template_args


def check_sequences(sample: Sample) -> None:
    """Check the sizes of the sequences, and that spans end where sequences end. Raises WireError naming the field."""
    if not sample.sequences:
        if 0 < sample.response_length == len(sample.tokens):
            raise WireError(
                "response_length", f"< {len(sample.tokens)} tokens: a token of context before the response", sample.response_length
            )
        return
    for place, size in enumerate(sample.sequences):
        if not 1 <= size.response_length < size.num_tokens:
            raise WireError(f"sequences[{place}]", "[L, R] with 1 <= R < L", list(size))
    for axis, total, name in ((0, len(sample.tokens), "tokens"), (1, sample.response_length, "response tokens")):
        if (found := sum(size[axis] for size in sample.sequences)) != total:
            raise WireError("sequences", f"to sum to {total} {name}", found)
    ends = np.cumsum([size.response_length for size in sample.sequences])
    crossed = np.setdiff1d(ends, np.cumsum([span.num_tokens for span in sample.spans]))
    if len(crossed):
        raise WireError("spans", f"to end where a sequence ends, at response token {int(crossed[0])}", "a span that crosses it")
    empty = np.flatnonzero(
        np.add.reduceat(sample.loss_mask, ends - [size.response_length for size in sample.sequences], dtype=np.int64) == 0
    )
    if len(empty):
        raise WireError("loss_mask", f"a trainable token in sequence {int(empty[0])}", "none")


def check_turns(sample: Sample, *, max_reward: float, max_seconds: float) -> None:
    """Check that turns lie in one sequence each, do not overlap, and cover the trainable tokens. Raises WireError naming the column."""
    turns = sample.turns
    if turns is None:
        return
    _check_columns(turns, max_seconds)
    at_C, tokens_C = turns.at.astype(np.int64), turns.tokens.astype(np.int64)
    end_C = at_C + tokens_C
    wrong = np.flatnonzero((at_C < 0) | (tokens_C < 1) | (end_C > sample.response_length))
    if len(wrong):
        place = int(wrong[0])
        want = f"at >= 0, tokens >= 1 and their sum <= response_length = {sample.response_length}"
        raise WireError(f"turns[{place}]", want, f"{int(at_C[place])} and {int(tokens_C[place])}")
    _check_places(sample, at_C, end_C)
    _check_turn_rewards(turns, max_reward)


def _check_columns(turns: Turns, max_seconds: float) -> None:
    count = len(turns.at)
    if len(turns.tokens) != count:
        raise WireError("turns.tokens", f"{count} values, as turns.at", len(turns.tokens))
    for name in ("begin_s", "seconds", "tools_s", "id", "finish", "agent"):
        if (length := len(getattr(turns, name))) not in (0, count):
            raise WireError(f"turns.{name}", f"{count} values or none", length)
    for name in ("begin_s", "seconds", "tools_s"):
        column: NDArray[np.float32] = getattr(turns, name)
        wrong = np.flatnonzero(~(np.abs(column) <= max_seconds))  # NaN fails the comparison, too
        if len(wrong):
            raise WireError(f"turns.{name}[{wrong[0]}]", f"a finite number within +-{max_seconds:g} s", float(column[wrong[0]]))


def _check_places(sample: Sample, at_C: NDArray[np.int64], end_C: NDArray[np.int64]) -> None:
    ends = np.cumsum([size.response_length for size in sample.sizes])
    crossing = np.flatnonzero(np.searchsorted(ends, at_C, side="right") != np.searchsorted(ends, end_C - 1, side="right"))
    if len(crossing):
        raise WireError(f"turns[{crossing[0]}]", "tokens of one sequence", f"{int(at_C[crossing[0]])} to {int(end_C[crossing[0]])}")
    # +1 at every begin and -1 behind every end: the running sum is the number of turns at each token.
    edges = np.zeros(sample.response_length + 1, np.int64)
    np.add.at(edges, at_C, 1)
    np.subtract.at(edges, end_C, 1)
    covered = np.cumsum(edges)[:-1]
    wrong = np.flatnonzero(covered != sample.loss_mask)
    if len(wrong):
        place = int(wrong[0])
        want = f"{int(sample.loss_mask[place])} turns at response token {place}, whose loss_mask is {int(sample.loss_mask[place])}"
        raise WireError("turns", want, int(covered[place]))


def _check_turn_rewards(turns: Turns, max_reward: float) -> None:
    seen: set[int] = set()
    for turn, reward in turns.rewards:
        if not 0 <= turn < len(turns.at) or turn in seen:
            raise WireError("turns.rewards", f"turns from 0 to {len(turns.at) - 1}, each once", turn)
        if not abs(reward) <= max_reward:
            raise WireError(f"turns.rewards of turn {turn}", f"a finite number within +-{max_reward:g}", reward)
        seen.add(turn)


def check_task(task: Task) -> None:
    """Check rollout, budget and template arguments of a task. Raises WireError naming the field."""
    if task.rollout and not RUN_NAME.fullmatch(task.rollout):
        raise WireError("rollout", "1 to 64 of A-Z a-z 0-9 _ -", task.rollout[:80])
    for name in ("budget", "chat_template_args"):
        if not task.rollout and getattr(task, name) is not None:
            raise WireError(name, "a task with a rollout", "one without")
    if task.budget is not None:
        _check_budget(task.budget)
    if task.chat_template_args is not None:
        check_template_args(task.chat_template_args)


def _check_budget(budget: Budget) -> None:
    for name in ("turns", "tokens", "context", "total_tokens"):
        if getattr(budget, name) < 0:
            raise WireError(f"budget.{name}", ">= 0 (0 = no limit)", getattr(budget, name))
    if not 0 <= budget.seconds < math.inf:
        raise WireError("budget.seconds", "a finite number >= 0 (0 = no limit)", budget.seconds)


def check_plan(plan: Plan) -> None:
    """Check the columns ``rows`` and ``masked`` of a plan against the others. Raises WireError naming the field."""
    if plan.masked is not None and not (len(plan.masked) and np.isin(plan.masked, plan.seqs).all()):
        raise WireError("masked", "one or more of seqs", plan.masked.tolist()[:5])
    if plan.rows is None:
        return
    if len(plan.rows) != len(plan.seqs) or (len(plan.rows) and plan.rows.min() < 1):
        raise WireError("rows", f"{len(plan.seqs)} numbers >= 1, one for each of seqs", f"{len(plan.rows)} numbers")
    total = int(plan.rows.sum(dtype=np.int64))
    for name in ("ranks", "micro_batches"):
        if len(getattr(plan, name)) != total:
            raise WireError(name, f"{total} values, the sum of rows", len(getattr(plan, name)))
