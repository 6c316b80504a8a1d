"""Deltas: base and changes make the version, bit for bit; whoever has another base is refused; what is torn is noticed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from tests.receiver_app import digest, tiny_tensors
from weightstore import delta, snapshot
from weightstore.errors import BadManifest, SnapshotBroken
from weightstore.manifest import ITEM_BYTES


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def changed(tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Every so many elements otherwise; one tensor stays."""
    generator, found = torch.Generator().manual_seed(5), copied(tensors)
    for name, tensor in found.items():
        raw = tensor.view(-1).view(torch.uint8).view(max(tensor.numel(), 0), -1) if tensor.numel() else tensor
        if name != "model.norm.weight" and tensor.numel() and tensor.dtype != torch.bool:
            hit = torch.rand(tensor.numel(), generator=generator) < share
            hit[-1] = True
            raw[hit, 0] ^= 1
    return found


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_base_and_delta_make_the_version(tmp_path: Path, share: float) -> None:
    base = (
        tiny_tensors(1) | {f"x.{name}": torch.zeros(300, dtype=getattr(torch, name)) for name in ITEM_BYTES} | {"empty": torch.empty(0, 4)}
    )
    new = changed(base, share)
    info = delta.write(tmp_path / "d", base, new, base_version=3, version=5, step=7)
    kinds = {change.spec.name: change.kind for change in info.changes}
    assert (kinds["model.norm.weight"], kinds["empty"], kinds["model.embed_tokens.weight"]) == (
        "same",
        "same",
        "sparse" if share < 0.1 else "dense",
    )
    assert (info.base, info.snapshot.version, info.snapshot.step) == (3, 5, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    have, read = copied(base), delta.read(tmp_path / "d")
    assert read == info
    delta.apply(tmp_path / "d", read, have)
    assert digest(have) == digest(new) != digest(base)
    some = {"model.layers.0.odd.weight": base["model.layers.0.odd.weight"].clone()}
    delta.apply(tmp_path / "d", read, some)
    assert torch.equal(some["model.layers.0.odd.weight"], new["model.layers.0.odd.weight"])


def test_another_base_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    base = tiny_tensors(1)
    info = delta.write(tmp_path / "d", base, changed(base, 0.1), base_version=3, version=5, step=7)
    have = copied(base)
    have["model.scale"].view(-1).view(torch.uint8)[0] ^= 1  # the last to be looked at
    before = digest(have)
    with pytest.raises(BadManifest, match=r"model.scale: want sum64 \w+ of base version 3, got"):
        delta.apply(tmp_path / "d", info, have)
    assert digest(have) == before
    with pytest.raises(BadManifest, match=r"other: want a tensor of the delta"):
        delta.apply(tmp_path / "d", info, {"other": torch.zeros(1)})
    with pytest.raises(BadManifest, match=r"model.scale: want float32\[\], got bfloat16\[\]"):
        delta.apply(tmp_path / "d", info, {"model.scale": torch.zeros((), dtype=torch.bfloat16)})
    with pytest.raises(BadManifest, match="delta of version 5 on 3"):
        delta.write(tmp_path / "e", base, {"model.scale": torch.zeros(())}, base_version=3, version=5, step=7)


def test_what_comes_out_is_checked(tmp_path: Path) -> None:
    """A wrong sum in the manifest stands for any fault of ours in between."""
    base = tiny_tensors(1)
    delta.write(tmp_path / "d", base, changed(base, 0.1), base_version=3, version=5, step=7)
    path = tmp_path / "d" / snapshot.MANIFEST
    row = json.loads(path.read_text())
    row["tensors"][0]["after"] = "0" * 16
    path.write_text(json.dumps(row))
    info = delta.read(tmp_path / "d")
    assert info is not None
    with pytest.raises(BadManifest, match=r"model.embed_tokens.weight: want sum64 0000000000000000 of version 5"):
        delta.apply(tmp_path / "d", info, copied(base))


def test_torn_deltas_are_noticed_and_models_are_no_deltas(tmp_path: Path) -> None:
    base = tiny_tensors(1)
    delta.write(tmp_path / "d", base, changed(base, 0.1), base_version=3, version=5, step=7)
    snapshot.write(tmp_path / "v", base, version=3, step=6)
    assert delta.read(tmp_path / "v") is None and delta.read(tmp_path) is None
    raw = bytearray((tmp_path / "d" / delta.FILE).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "d" / delta.FILE).write_bytes(raw)
    with pytest.raises(SnapshotBroken, match="SHA-256"):
        delta.read(tmp_path / "d")


def test_few_changes_make_a_small_file(tmp_path: Path) -> None:
    base = {"w": torch.randn(200_000).to(torch.bfloat16)}
    new = changed(base, 0.02)
    info = delta.write(tmp_path / "d", base, new, base_version=0, version=1, step=1)
    assert info.num_bytes < 0.02 * 400_000


def test_a_frame_that_states_another_size_is_refused_before_it_has_memory(tmp_path: Path) -> None:
    base = {"w": torch.zeros(100, dtype=torch.int32)}
    info = delta.write(tmp_path / "d", base, {"w": base["w"] + 1}, base_version=3, version=5, step=7)
    for stated in (1 << 50, 400 << 20, 399):
        frame = bytes.fromhex("28b52ffde0") + stated.to_bytes(8, "little") + bytes.fromhex("010000")
        (tmp_path / "d" / delta.FILE).write_bytes(frame)
        (change,) = info.changes
        hostile = replace(info, changes=(replace(change, at=(0, len(frame))),))
        with pytest.raises(BadManifest, match=rf"want 100 numbers of 4 bytes, got a frame of {stated} bytes"):
            delta.apply(tmp_path / "d", hostile, copied(base))
    (tmp_path / "d" / delta.FILE).write_bytes(b"no frame")
    with pytest.raises(BadManifest, match="want 100 numbers of 4 bytes"):
        delta.apply(tmp_path / "d", replace(info, changes=(replace(change, at=(0, 8)),)), copied(base))


@pytest.mark.parametrize(
    ("count", "gaps", "wrong"), [(1 << 40, [1], "changed elements"), (2, [90, 90], "changes of elements"), (1, [0], "changes of")]
)
def test_changes_outside_of_a_tensor_are_refused(tmp_path: Path, count: int, gaps: list[int], wrong: str) -> None:
    base = {"w": torch.zeros(100, dtype=torch.int32)}
    new = copied(base)
    new["w"][5] = 1
    info = delta.write(tmp_path / "d", base, new, base_version=3, version=5, step=7)
    frames = [
        zstandard.ZstdCompressor().compress(np.array(gaps, dtype).view(np.uint8).reshape(len(gaps), 4).T.tobytes())
        for dtype in ("<u4", "<i4")
    ]
    (tmp_path / "d" / delta.FILE).write_bytes(b"".join(frames))
    (change,) = info.changes
    hostile = replace(change, changed=count, at=(0, *map(len, frames)))
    with pytest.raises(BadManifest, match=wrong):
        delta.apply(tmp_path / "d", replace(info, changes=(hostile,)), copied(base))
