"""The tables of memory in docs/devices.md have the numbers that ``tidemill config --memory`` computes."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.memory_table import MemoryRow, memory_rows
from tidemill.launch.settings.config_loader import load

PAGE = Path(__file__).resolve().parents[2] / "docs/devices.md"
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
SMALL = QWEN3 | {"num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True}
SIZES = {
    "Qwen3-0.6B": SMALL | {"hidden_size": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": SMALL | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen3-8B": QWEN3
    | {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "hidden_size": 4096,
        "intermediate_size": 12288,
    },
}
"""Sources: config.json of the models of these names at huggingface.co/Qwen."""
ROWS = (
    "learner.dtype=bfloat16",
    "learner.max_tokens_per_micro_batch=8192",
    "data.max_prompt_tokens=8",
    "sampling.max_new_tokens=2040",
)


def table(title: str) -> list[list[str]]:
    """Return the cells of the table whose first cell is ``title``, header first, without the line below it."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {title} |"))
    last = next(number for number, line in enumerate(lines[first:], first) if not line.startswith("|"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[first:last]
        if not line.startswith("|---")
    ]


def computed(model: str, *settings: str) -> list[MemoryRow]:
    """Return the rows of a rank on an accelerator."""
    shape = ModelShape.of(SIZES[model], where=model)
    return [row for row in memory_rows(shape, load([], (*ROWS, *settings)).config, cuda=True) if row.process == "rank"]


def size(rows: Sequence[MemoryRow], *parts: str, on_host: bool = False) -> float:
    """Return the bytes of the rows that begin with one of ``parts``."""
    return sum(row.bytes for row in rows if row.on_host is on_host and row.part.startswith(parts))


def gb(*sizes: float) -> str:
    return " + ".join(f"{one / 1e9:.1f}" for one in sizes)


KEPT, AGAIN = "activations kept", "activations of one layer"


@pytest.mark.parametrize("column", range(1, 5))
def test_the_table_of_a_rank(column: int) -> None:
    header, *lines = table("GB in a rank")
    model, _, setting = header[column].partition(", ")
    settings = re.findall(r"`([\w.]+): (\w+)`", setting)
    given = [f"learner.{name}={value}" for name, value in settings]
    rows = computed(model, *given)
    some, all_ = (computed(model, f"learner.recompute={choice}", *given) for choice in ("selective", "full"))
    wanted = {
        "weights": gb(size(rows, "weights")),
        "gradients, float32": gb(size(rows, "gradients")),
        "Adam and main weights, float32": gb(size(rows, "Adam")),
        "activations kept for the backward pass": gb(size(rows, KEPT)),
        "with `recompute: selective`: kept, and computed again for one layer at a time": gb(
            size(some, KEPT), size(some, AGAIN)
        ),
        "with `recompute: full`": gb(size(all_, KEPT), size(all_, AGAIN)),
        "logits at once": gb(size(rows, "logits")),
        "sum, without recomputation": gb(size(rows, "")),
    }
    assert {line[0]: line[column] for line in lines} == wanted


def test_the_table_of_the_optimizer() -> None:
    _, *lines = table("bfloat16, GB in a rank without activations")
    model, previous = "", list[str]()
    for line in lines:
        model = next((name for name in SIZES if name in line[0]), model)
        more = previous if line[0].startswith("the same with") else []
        given = [*more, *(f"learner.{name}={value}" for name, value in re.findall(r"`([\w.]+): (\w+)`", line[0]))]
        previous = given
        rows = computed(model, *given)
        state, device = size(rows, "weights", "gradients"), size(rows, "Adam")
        host = size(rows, "Adam", on_host=True)
        assert line[1:] == [gb(state), gb(device), gb(state + device), gb(host) if host else ""], line[0]


def test_the_processes_that_send_over_nccl() -> None:
    shapes = {model: ModelShape.of(values, where=model) for model, values in SIZES.items()}
    config = load([], ROWS).config
    rows = {model: memory_rows(shape, config, cuda=True) for model, shape in shapes.items()}
    sizes = {
        model: next(row.bytes for row in found if row.part.startswith("processes of 1 group"))
        for model, found in rows.items()
    }
    assert ", ".join(f"{gb(each)} GB for {model}" for model, each in sizes.items()) in PAGE.read_text()
