"""The built-in engine's own forward pass against transformers': scores within 1e-5 of their largest, whole and token by
token.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_decoding import decode_all, decode_attention, load, new_memory, prefill_attention
from tests.refusals import refusal
from tests.tiny_models import FAMILIES, SERVED, as_transformers_4, tiny_model, write_tiny_model
from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.shape import ModelShape

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(family, {"tied": tied}) for family in FAMILIES for tied in (False, True)],
    ("llama", {"rope_scaling": LLAMA3, "head_dim": 16}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "rope_theta": 1e6}),
    ("qwen2", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("mistral", {}),
    ("mistral", {"tied": True, "sliding_window": 256}),
    *[("glm4", {"tied": tied}) for tied in (False, True)],
    (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 1.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    *[("qwen3_moe", {"tied": tied}) for tied in (False, True)],
    ("qwen3_moe", {"norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
@torch.inference_mode()
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    weights = load(write_tiny_model(tmp_path, family, **changes))
    model = tiny_model(family, **changes)
    tokens_BT = torch.randint(3, 299, (2, 160), generator=torch.Generator().manual_seed(1))
    want = model(tokens_BT).logits
    got = decode_all(weights, tokens_BT, prefilled=120)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_settings_of_transformers_4_give_the_same_shape(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    directory = write_tiny_model(tmp_path / "5", family, **({"rope_theta": 500.0} | changes))
    shape = ModelShape.read(directory)
    assert ModelShape.read(as_transformers_4(directory, tmp_path / "4")) == shape
    assert shape.rope.theta == changes.get("rope_theta", 500.0)


@pytest.mark.parametrize("family", SERVED)
@torch.inference_mode()
def test_bfloat16_is_near_float32(tmp_path: Path, family: str) -> None:
    model_dir = write_tiny_model(tmp_path, family)
    tokens_BT = torch.randint(3, 299, (2, 48), generator=torch.Generator().manual_seed(1))
    want = decode_all(load(model_dir), tokens_BT, prefilled=40)
    got = decode_all(load(model_dir, torch.bfloat16), tokens_BT, prefilled=40)
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < 0.03 * want.abs().max()


@torch.inference_mode()
def test_rows_of_one_batch_have_their_own_positions(tmp_path: Path) -> None:
    """Rows of different lengths, right-padded prompts, shared blocks and moved rows each give the scores of the row
    alone.
    """
    weights = load(write_tiny_model(tmp_path))
    model, table = tiny_model(), decoder.RopeTable(weights, 64)
    random = np.random.default_rng(0)
    contexts = [random.integers(3, 299, length).tolist() for length in (5, 17, 9)]
    padded = torch.tensor([context + [0] * (17 - len(context)) for context in contexts])
    memory = new_memory(weights, 8)
    tables = [[7], [2, 4], [2, 0], [5]]
    attention = prefill_attention(memory, tables, [0, 1, 1, 2], [5, 17, 9])
    decoder.forward(weights, padded, table.at(torch.arange(17)[None]), attention)
    tables = [tables[3], tables[1], tables[2]]  # row 0 leaves, row 3 takes its place
    rows = [contexts[2], contexts[1], contexts[1]]
    next_tokens = [7, 8, 9]
    positions = [len(row) for row in rows]
    x = decoder.forward(
        weights,
        torch.tensor(next_tokens)[:, None],
        table.at(torch.tensor(positions)[:, None]),
        decode_attention(memory, tables, positions),
    )
    got = decoder.logits(weights, x[:, 0])
    for row, (context, token) in enumerate(zip(rows, next_tokens, strict=True)):
        want = model(torch.tensor([[*context, token]])).logits[0, -1]
        assert (got[row] - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window"),
        ({"model_type": "qwen3_moe"}, "num_experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_it_cannot_decode_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    import json

    path = write_tiny_model(tmp_path) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(UnsupportedModel, match=named):
        ModelShape.read(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with refusal(UnsupportedModel, where=re.compile(r"config\.json$")):
        ModelShape.read(tmp_path)
