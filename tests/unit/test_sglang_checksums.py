"""SGLang's parameters in terms of the tensors that were sent: fused, padded, tied; and cases in which its checksums
cannot be compared.
"""

import hashlib
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model
from tidemill.actors.serving.sglang.tensors import VOCAB_ROWS, layout_of, report_of
from tidemill.weightstore.format.checksums import differences, sum_of

CPU = {"device": "cpu", "tp_size": 1, "dtype": "float32"}


def kept_by_sglang(sent: Mapping[str, Tensor], *, tied: bool) -> dict[str, str]:
    """Return the answer of /weights_checker of a real server (0.5.23, CPU) for these tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in sent.items():
        for fused, parts in {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            for part in parts:
                if f".{part}." in name:
                    whole = name.replace(f".{part}.", f".{fused}.")
                    found[whole] = torch.cat([found[whole], tensor]) if whole in found else tensor
                    break
            else:
                continue
            break
        else:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensor = torch.cat([tensor, torch.zeros(-len(tensor) % VOCAB_ROWS, tensor.shape[1])])
            if not (tied and name == "lm_head.weight"):
                found[name] = tensor
    return {name: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16] for name, tensor in found.items()}


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen2", True)])
def test_every_tensor_is_covered_and_one_bit_shows(family: str, tied: bool) -> None:
    sent = {name: tensor.detach() for name, tensor in tiny_model(family, seed=3, tied=tied).state_dict().items()}
    vocab_size, hidden_size = sent["model.embed_tokens.weight"].shape
    assert vocab_size % VOCAB_ROWS
    layout = layout_of(CPU, vocab_size=vocab_size, hidden_size=hidden_size)
    assert layout.not_comparable == ""
    told = report_of(kept_by_sglang(sent, tied=tied), layout)
    assert {name for part in told.parts for name in part.names} == set(sent)
    assert differences(told, sent, lambda part: sum_of("sha256", part, sent)) == []
    for lost in (
        "model.layers.1.self_attn.v_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        other = {name: tensor.clone() for name, tensor in sent.items()}
        other[lost].view(-1).view(torch.uint8)[3] ^= 1
        lines = differences(told, other, lambda part, other=other: sum_of("sha256", part, other))  # type: ignore[misc]
        assert len(lines) == 1 and lost in lines[0]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({**CPU, "device": "cuda"}, "on cuda SGLang computes them in a way of its own"),
        ({**CPU, "tp_size": 2}, "each of 2 ranks has a part"),
        ({**CPU, "dtype": "auto"}, "want dtype float32, bfloat16, float16, got auto"),
        ({}, "on None"),
    ],
)
def test_tensors_that_cannot_be_compared_are_reported(info: Mapping[str, object], reason: str) -> None:
    assert reason in layout_of(info, vocab_size=300, hidden_size=8).not_comparable
