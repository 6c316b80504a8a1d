"""Attention of packed rows by transformers' interface, against a loop over the sequences."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.learner.backends.fsdp.attention import CurrentRow, attend
from tidemill.learner.kernels.packed_rows import packed_row

LENGTHS = (9, 1, 14, 5)
HEADS, GROUPS, SIZE = 4, 2, 8
SINKS = torch.linspace(-1, 1, HEADS)
RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "a window": {"sliding_window": 4},
    "a window longer than all sequences": {"sliding_window": 64},
    "a chunk": {"chunk": 4},
    "a cap": {"softcap": 2.0},
    "sinks": {"s_aux": SINKS},
    "sinks and a window": {"s_aux": SINKS, "sliding_window": 3},
    "a cap and a window": {"softcap": 2.0, "sliding_window": 3},
    "another scale": {"scaling": 0.7},
}


def alone(q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
    """Return attention of one sequence by the formula: q [n, s, d], k and v [g, s, d] -> [s, n, d]."""
    out = torch.zeros(q.shape[1], HEADS, v.shape[-1])
    for head in range(HEADS):
        keys, values = k[head // (HEADS // GROUPS)], v[head // (HEADS // GROUPS)]
        for place in range(q.shape[1]):
            first = 0
            if window := rules.get("sliding_window"):
                first = max(first, place - window + 1)
            if chunk := rules.get("chunk"):
                first = max(first, place // chunk * chunk)
            scores = keys[first : place + 1] @ q[head, place] * rules.get("scaling", SIZE**-0.5)
            if cap := rules.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            sinks = [SINKS[head : head + 1]] if "s_aux" in rules else []
            shares = torch.cat([scores, *sinks]).softmax(0)[: len(scores)]
            out[place, head] = shares @ values[first : place + 1]
    return out


def layer(row: CurrentRow, rules: dict[str, Any]) -> Any:
    """Return what the attention reads of a layer of transformers."""
    config = SimpleNamespace(attention_chunk_size=rules.get("chunk"))
    return SimpleNamespace(current_row=row, config=config, use_rope="chunk" in rules)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(1, HEADS, tokens, SIZE, requires_grad=True),
        torch.randn(1, GROUPS, tokens, SIZE, requires_grad=True),
        torch.randn(1, GROUPS, tokens, SIZE, requires_grad=True),
    )


def of_transformers(rules: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rules.items() if name != "chunk"}


@pytest.mark.parametrize("name", RULES)
def test_a_row_is_attended_sequence_by_sequence(name: str) -> None:
    rules, (q, k, v) = RULES[name], inputs(sum(LENGTHS))
    row = CurrentRow()
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    row.set(packed_row(np.cumsum([0, *LENGTHS]).astype(np.int32), positions_T))
    out, _ = attend(layer(row, rules), q, k, v, None, **of_transformers(rules))
    parts = zip(*(x[0].split(LENGTHS, dim=1) for x in (q, k, v)), strict=True)
    wanted = torch.cat([alone(*part, rules) for part in parts])
    torch.testing.assert_close(out[0], wanted)
    factor = torch.randn_like(wanted)
    gradients = torch.autograd.grad((out[0] * factor).sum(), (q, k, v), retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad((wanted * factor).sum(), (q, k, v)))


@pytest.mark.parametrize("name", RULES)
def test_a_common_beginning_is_seen_by_both_sequences(name: str) -> None:
    """The row has a prompt of 6 tokens, and behind it two responses: 3 tokens of the first, 5 of the second."""
    rules, (q, k, v) = RULES[name], inputs(14)
    prompt, first, second = slice(0, 6), slice(6, 9), slice(9, 14)
    row = CurrentRow()
    positions_T = torch.tensor([*range(6), *range(6, 9), *range(6, 11)])
    row.set(packed_row(np.array([0, 9, 14], np.int32), positions_T, prefixes=[(), ((0, 6),)]))
    out, _ = attend(layer(row, rules), q, k, v, None, **of_transformers(rules))
    wanted = [
        alone(*(torch.cat([x[0][:, prompt], x[0][:, behind]], dim=1) for x in (q, k, v)), rules)
        for behind in (first, second)
    ]
    torch.testing.assert_close(out[0, :9], wanted[0])
    torch.testing.assert_close(out[0, 9:], wanted[1][6:])


def test_a_mask_of_the_family_is_refused() -> None:
    row, (q, k, v) = CurrentRow(), inputs(4)
    with pytest.raises(NotImplementedError):
        attend(layer(row, {}), q, k, v, torch.ones(4, 4))
