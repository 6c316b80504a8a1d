"""Comparison of dumps: the first thing that differs is named, with its place; dumps that cannot be compared are
refused.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.refusals import refusal
from tidemill.launch.cli.main import main
from tidemill.learner.debug.comparison import compare_modules, compare_train
from tidemill.learner.debug.train_file import (
    RECORD,
    TRAIN,
    ModuleDump,
    read_modules,
    read_train,
    record_path,
    train_dump,
    write,
    write_modules,
)
from tidemill.learner.errors import DebugFileRefused

ORDER = ("embedding", "layers.0.attention.qkv", "layers.0.mlp", "layers.0", "layers.1.attention.core", "log_probs")
PROMPTS = [[1, 2, 3], [4, 5]]


def modules(changed: str = "", by: float = 0.0, **other: Any) -> ModuleDump:
    """Return a dump; ``changed``: the prompt and module whose last token is moved by ``by``."""
    generator = np.random.default_rng(0)
    outputs = {
        f"{n}.{name}": generator.normal(size=(len(one), 4)).astype(np.float32)
        for n, one in enumerate(PROMPTS)
        for name in ORDER
    }
    if changed:
        outputs[changed][-1, 2] += by
    return ModuleDump(**({"source": "s", "dtype": "float32", "prompts": PROMPTS, "outputs": outputs} | other))


@pytest.mark.parametrize(
    ("name", "hint"), [("layers.0.attention.qkv", "biases"), ("layers.0.mlp", "gate"), ("log_probs", "temperature")]
)
def test_the_first_module_that_differs_is_named(name: str, hint: str) -> None:
    found = compare_modules(modules(f"1.{name}", 0.5), modules())
    assert found.first is not None
    assert (found.first.name, found.first.place) == (name, "prompt 1, token 1")
    assert found.first.largest == pytest.approx(0.5, rel=1e-5) and hint in found.first.hint
    assert [one.name for one in found.differences] == [name]
    assert list(found.compared) == list(ORDER)


def test_rounding_is_no_difference_and_nan_is_one() -> None:
    assert compare_modules(modules("0.embedding", 1e-5), modules()).first is None
    assert compare_modules(modules("0.embedding", 1e-5), modules(), 0.0).first is not None
    assert compare_modules(modules("0.embedding", 0.02), modules()).first is not None
    assert (
        compare_modules(modules("0.embedding", 0.02, dtype="bfloat16"), modules()).first is None
    )  # that of the coarser dtype
    assert compare_modules(modules("0.layers.0", np.nan), modules()).first is not None
    cut = modules()
    cut = modules(
        outputs={name: value[:1] if name == "0.layers.0.mlp" else value for name, value in cut.outputs.items()}
    )
    first = compare_modules(cut, modules()).first
    assert first is not None and "shapes (1, 4), (3, 4)" in first.place


def test_dumps_of_other_prompts_or_modules_are_refused() -> None:
    with refusal(ValueError, place="prompts"):
        compare_modules(modules(), modules(prompts=[[1, 2, 3], [4, 6]]))
    lone = modules(outputs={f"{n}.x": np.zeros((len(one), 4), np.float32) for n, one in enumerate(PROMPTS)})
    with refusal(ValueError, place="modules"):
        compare_modules(modules(), lone)
    few = modules(outputs={name: value for name, value in modules().outputs.items() if "mlp" not in name})
    assert compare_modules(modules(), few).notes == ["in one dump only: layers.0.mlp"]


def written(path: Path, kind: str = TRAIN, *, step: int = 1, ids: tuple[int, ...] = (3, 7), **changes: Any) -> Path:
    """Write a dump of two sequences of 4 and 3 tokens with responses of 2 and 1."""
    generator = np.random.default_rng(1)
    columns: dict[str, Any] = {
        "sequence_ids": np.array(ids, np.int32),
        "total_lengths": np.array([4, 3], np.int32),
        "response_lengths": np.array([2, 1], np.int32),
        "unconcat_tokens": np.arange(7, dtype=np.int32),
    }
    values = generator.normal(size=3).astype(np.float32)
    names = ("log_probs", "entropy") if kind == RECORD else ("advantages", "current_log_probs", "current_entropy")
    columns |= {name: values.copy() for name in names} | changes.pop("columns", {})
    header = {
        "kind": kind,
        "step": step,
        "rank": 0,
        "role": "actor",
        "num_steps": 1,
        "parallel_info": {"dp_rank": 0},
        "metrics": {},
        "steps": [{"step_id": 0, "loss_dict": {"loss": 0.1}, "grad_norm": changes.get("norm", 0.5)}],
    }
    write(path, header, {f"steps.0.{name}": value for name, value in columns.items()})
    return path


def test_train_dumps_are_read_by_sequence(tmp_path: Path) -> None:
    dump = read_train(written(tmp_path / "a.safetensors"))
    assert (dump.num_steps, dump.role, dump.steps[0].grad_norm, dump.steps[0].loss_dict) == (
        1,
        "actor",
        0.5,
        {"loss": 0.1},
    )
    assert [one.tolist() for one in dump.steps[0].debug_data["unconcat_tokens"]] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [len(one) for one in dump.steps[0].debug_data["advantages"]] == [2, 1]
    for content in (b"", b"no safetensors", json.dumps({}).encode()):
        (tmp_path / "b").write_bytes(content)
        with refusal(DebugFileRefused, where=re.compile(r"/b$")):
            read_train(tmp_path / "b")


def test_the_first_field_that_differs_is_named(tmp_path: Path) -> None:
    base = read_train(written(tmp_path / "a"))
    moved = base.steps[0].debug_data["advantages"]
    other = read_train(
        written(tmp_path / "b", columns={"advantages": np.concatenate(moved) + np.array([0, 0.25, 0], np.float32)})
    )
    found = compare_train(base, other)
    assert found.first is not None and found.first.name == "advantages"
    assert found.first.largest == pytest.approx(0.25) and "sequence 3, token 1" in found.first.place
    assert compare_train(base, read_train(written(tmp_path / "c"))).first is None
    norms = compare_train(base, read_train(written(tmp_path / "d", norm=0.6)))
    assert norms.first is not None and norms.first.name == "grad_norm"


def test_a_response_without_tokens_is_compared(tmp_path: Path) -> None:
    columns = {"response_lengths": np.array([3, 0], np.int32)}
    one, other = (read_train(written(tmp_path / name, columns=columns)) for name in "ab")
    assert compare_train(one, other).first is None


def test_sequences_are_matched_by_their_number(tmp_path: Path) -> None:
    """Another layout has other sequences on a rank: only those that both have are compared."""
    base, other = read_train(written(tmp_path / "a")), read_train(written(tmp_path / "b", ids=(3, 9)))
    assert compare_train(base, other).notes[0] == "1 sequences compared"
    with refusal(ValueError, place="sequences"):
        compare_train(base, read_train(written(tmp_path / "c", ids=(8, 9))))
    with refusal(ValueError, place="step"):
        compare_train(base, read_train(written(tmp_path / "d", step=2)))


def test_the_command_finds_the_record_of_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t_1_0.safetensors")
    assert record_path(file).name == "t_1_0_record.safetensors"
    written(record_path(file), RECORD)
    assert main(["debug", "compare", str(file)]) == 0
    assert "equal: current_log_probs, current_entropy" in capsys.readouterr().out
    log_probs = np.concatenate(train_dump(*_raw(record_path(file))).steps[0].debug_data["log_probs"])
    written(record_path(file), RECORD, columns={"log_probs": log_probs + np.array([0, 0, 1e-3], np.float32)})
    assert main(["debug", "compare", str(file)]) == 1
    assert "DIFFERS first in current_log_probs: largest difference 0.001" in capsys.readouterr().out
    assert main(["debug", "compare", str(file), "--tolerance", "0.01"]) == 0
    assert main(["debug", "compare", str(file), str(tmp_path / "none")]) == 78
    assert "none: want a file of debug.save_train" in capsys.readouterr().err


def _raw(path: Path) -> Any:
    from tidemill.learner.debug.train_file import read

    return read(path)


def test_the_command_compares_dumps_of_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, dump in zip(paths, (modules(), modules("0.layers.0", 2.0)), strict=True):
        write_modules(path, dump.outputs, prompts=PROMPTS, dtype="float32", source="x")
    assert list(read_modules(paths[0]).outputs) == list(modules().outputs)  # the order of computation
    assert main(["debug", "compare", *map(str, paths), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["name"] == "layers.0"
    assert main(["debug", "compare", *map(str, paths)]) == 1
    assert (
        "equal: embedding, layers.0.attention.qkv, layers.0.mlp\nDIFFERS first in layers.0:" in capsys.readouterr().out
    )
    assert main(["debug", "compare", str(paths[0]), str(written(tmp_path / "t"))]) == 2
