"""Tensors of a model directory by name, and the ranks that take part in a push of experts."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.refusals import refusal
from tidemill.learner.backends.megatron.local_layers import INDEX, ModelFiles
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.layout.sizes import num_senders

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


def test_one_file_and_several(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    files = ModelFiles(tmp_path)
    assert torch.equal(files.tensor("a"), A) and torch.equal(files.tensor("b"), B)
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({"a": A}, parts / "1.safetensors")
    save_file({"b": B, "unlisted": A}, parts / "2.safetensors")
    (parts / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    files = ModelFiles(parts)
    assert torch.equal(files.tensor("a"), A) and torch.equal(files.tensor("b"), B)
    with refusal(ConfigRefused, field=re.compile(r"parts$"), got="none"):
        files.tensor("unlisted")


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with refusal(ConfigRefused, got="no such file"):
        ModelFiles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "2.safetensors").write_bytes(b"\xff" * 40)
    files = ModelFiles(tmp_path)
    for name, file in (("a", "1.safetensors"), ("b", "2.safetensors")):
        with refusal(ConfigRefused, field=re.compile(re.escape(file)), want=re.compile(rf"\b{name}$")):
            files.tensor(name)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"dp_size": 4}, [0]),
        ({"dp_size": 2, "tp_size": 2}, [0, 1]),
        ({"dp_size": 4, "ep_size": 2}, [0, 1]),
        ({"dp_size": 4, "ep_size": 4}, [0, 1, 2, 3]),
        ({"dp_size": 2, "tp_size": 2, "ep_size": 2}, [0, 1]),
        ({"dp_size": 2, "tp_size": 2, "ep_size": 4}, [0, 1, 2, 3]),
        ({"dp_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": 4}, [0, 1, 2, 3]),
        # A rank of the experts' group has peers outside it, without which it cannot gather its split weights.
        ({"dp_size": 3, "tp_size": 4, "ep_size": 6}, list(range(12))),
        ({"dp_size": 2, "cp_size": 2}, [0]),
        ({"dp_size": 4, "sharded_size": 4}, [0, 1, 2, 3]),
    ],
)
def test_ranks_of_a_push_are_whole_groups(sizes: dict[str, int], wanted: list[int]) -> None:
    """A rank's place in its stage: tensor-parallel ranks are neighbours, then context-parallel ones, then replicas."""
    plain: dict[str, Any] = {one.name: int(one.name.endswith("_size")) for one in dataclasses.fields(Parallel)} | sizes
    tp, cp = plain["tp_size"], plain["cp_size"]
    places = [
        Parallel(**plain | {"tp_rank": rank % tp, "cp_rank": rank // tp % cp, "dp_rank": rank // tp // cp})
        for rank in range(tp * cp * plain["dp_size"])
    ]
    assert [number for number, place in enumerate(places) if place.exports] == wanted


@pytest.mark.parametrize(("sharded", "at_most", "senders"), [(4, 0, 4), (32, 0, 8), (32, 16, 16), (4, 16, 4)])
def test_many_ranks_of_fsdp_do_not_all_send_by_default(sharded: int, at_most: int, senders: int) -> None:
    assert num_senders(1, 1, at_most, sharded=sharded) == senders
