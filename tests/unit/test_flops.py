"""Operations of a step, against numbers that were worked out by hand."""

import pytest

from tidemill.learner.layout.sizes import StepFlops

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES = {
    "0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@pytest.mark.parametrize(
    ("name", "layer", "output", "pair"),
    [
        # queries, keys and values + output projection + three matrices of the MLP; output layer; 2 products x layers x
        # heads x 128
        ("0.6B", 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072, 155_582_464, 28 * 2 * 16 * 128),
        ("1.7B", 2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144, 311_164_928, 28 * 2 * 16 * 128),
        ("8B", 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288, 622_329_856, 36 * 2 * 32 * 128),
    ],
)
def test_known_shapes(name: str, layer: int, output: int, pair: int) -> None:
    flops = StepFlops.of(SHAPES[name])
    assert flops.per_token == 6 * (SHAPES[name]["num_hidden_layers"] * layer + output)
    assert flops.per_pair == 6 * pair


def test_the_sums_of_a_row_of_8k_tokens() -> None:
    tokens = {name: StepFlops.of(shape).per_token * 8192 / 1e12 for name, shape in SHAPES.items()}
    assert tokens == pytest.approx({"0.6B": 29.29, "1.7B": 84.56, "8B": 371.99}, abs=0.01)


def test_a_value_head_has_one_row() -> None:
    values = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    whole, head = StepFlops.of(values), StepFlops.of(values, value_head=True)
    assert whole.per_token - head.per_token == 6 * 8 * 99 and whole.per_pair == head.per_pair


def test_attention_counts_the_causal_half() -> None:
    flops = StepFlops(per_token=10, per_pair=1)
    assert flops.step([3]) == 30 + (1 + 2 + 3)
    assert flops.step([2, 1]) == 30 + (1 + 2) + 1
    assert flops.step([]) == 0


def test_sizes_that_a_configuration_leaves_out() -> None:
    whole = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    given = StepFlops.of(whole | {"num_key_value_heads": 4, "head_dim": 16})
    assert StepFlops.of(whole) == given == StepFlops.of(whole | {"num_key_value_heads": None, "head_dim": None})
    assert given.per_token == 6 * (2 * (64 * 3 * 64 + 64 * 64 + 3 * 64 * 128) + 64 * 100)
