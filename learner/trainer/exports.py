"""Exported models: directories, digests, adapters (new ones, too), and the tensors of a model that no backend trains:
heads for further tokens (MTP), parts for images and sound.

Those stay in the files of the model with which a run began: no rank has them in memory, and no checkpoint has them by
content. Every directory of the trained model has them again, read one at a time.
"""

import hashlib
import json
import logging
import shutil
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidemill.learner.checkpoints.decoding import DECODERS, FP8_SCALE
from tidemill.learner.layout.model_files import StoredTensor, beside_text_in
from tidemill.learner.layout.parallel import from_first
from tidemill.learner.settings.lora import LoraConfig
from tidemill.weightstore.format.adapters import CONFIG, WEIGHTS
from tidemill.weightstore.format.manifest import Manifest, TensorSpec
from tidemill.weightstore.store import snapshot_files
from tidemill.weightstore.store.snapshot_files import ASIDE, rename_into_place

log = logging.getLogger(__name__)

ADAPTER = "adapter"
"""Directory of the adapters inside the merged model's directory: beside the model's files, libraries would load them on
top of it.
"""
_NAMES = {code: name for name, code in snapshot_files.CODES.items()}
DIGEST_BYTES = 65_536
"""Bytes of each tensor that its digest is computed of, at most."""
_SHARED = {".embed_tokens.weight": "embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}
"""Ends of the names of copies that an MTP layer has in the files, and of the tensors of the model that it shares."""


class KeptTensors(Mapping[str, Tensor]):
    """The tensors of a model's files that the trained ones are without. Each is read when it is requested."""

    def __init__(self, model_dir: Path, trained: Mapping[str, Tensor], manifest: Manifest) -> None:
        """``trained``: the exported tensors, and ``manifest`` of them."""
        sizes: dict[str, int] = {}
        for spec in manifest.specs:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
        self._dtype = max(sizes, key=sizes.__getitem__, default="float32")
        self._trained, self._manifest, self._model_dir = trained, manifest, model_dir
        self._all = beside_text_in(model_dir)
        self._stored = {
            name: stored
            for name, stored in self._all.items()
            if name not in manifest.by_name and not self._is_scale(name)
        }

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes: those of the files, and of encoded ones the dtype of the trained tensors."""
        return [TensorSpec(name=name, shape=self._stored[name].shape, dtype=self._dtype_of(name)) for name in self]

    def __getitem__(self, name: str) -> Tensor:
        if shared := self._shared(name):
            return self._trained[shared]
        tensor = _read(self._stored[name], name)
        if (scale := self._all.get(name + FP8_SCALE)) is not None:
            # config.json of a trained model has no encoding, so no tensor of it may have one.
            parts = {name: tensor, name + FP8_SCALE: _read(scale, name + FP8_SCALE)}
            settings = json.loads((self._model_dir / "config.json").read_text(encoding="utf-8"))["quantization_config"]
            tensor = DECODERS["fp8"](parts, settings)[name].to(getattr(torch, self._dtype))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(FP8_SCALE) and name.removesuffix(FP8_SCALE) in self._all

    def _dtype_of(self, name: str) -> str:
        if shared := self._shared(name):
            return self._manifest.by_name[shared].dtype
        return self._dtype if name + FP8_SCALE in self._all else _NAMES[self._stored[name].dtype]

    def _shared(self, name: str) -> str:
        """Return the name of the trained tensor that an MTP layer shares by this one; empty = it shares none."""
        source = next((source for end, source in _SHARED.items() if name.endswith(end)), "")
        specs = (spec for spec in self._manifest.specs if source and f".{spec.name}".endswith(f".{source}"))
        return next((spec.name for spec in specs if spec.shape == self._stored[name].shape), "")


def write_model(
    directory: Path, tensors: Mapping[str, Tensor], *, version: int, step: int, model_dir: Path, manifest: Manifest
) -> None:
    """Write the trained ``tensors`` as a model directory, with all that ``model_dir`` has beside them. Raises OSError,
    ValueError.
    """
    kept = KeptTensors(model_dir, tensors, manifest)
    if kept:
        log.info("tensors that are not trained are copied count=%d model=%s", len(kept), model_dir)
    snapshot_files.write(
        directory,
        ChainMap(tensors, kept),  # type: ignore[arg-type]  # nothing is written into it
        version=version,
        step=step,
        model_dir=model_dir,
        manifest=Manifest([*manifest.specs, *kept.specs]),
    )


def digest_of_kept(model_dir: Path, device: torch.device) -> str:
    """Return ``digest`` on all ranks; the first one reads the files, and its errors end all. Collective."""
    return from_first(lambda: digest(model_dir), device=device)


def digest(model_dir: Path) -> str:
    """Return SHA-256 of the tensors of a model's files that a text model is computed without; empty = none.

    Of each tensor the first ``DIGEST_BYTES`` count, because every start computes the digest: the head of DeepSeek-V3
    has 23 GB in 1,560 tensors. Other heads differ in each of them.
    """
    total = hashlib.sha256()
    stored = beside_text_in(model_dir)
    for name in sorted(stored):
        total.update(f"{name} {stored[name].dtype} {stored[name].shape} ".encode())
        with stored[name].file.open("rb") as file:
            file.seek(stored[name].offset)
            total.update(file.read(min(DIGEST_BYTES, stored[name].num_bytes)))
    return total.hexdigest() if stored else ""


def _read(stored: StoredTensor, name: str) -> Tensor:
    with safe_open(stored.file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], config: LoraConfig, model_dir: Path) -> None:
    """Write exported adapters on the model of ``model_dir``; the directory is replaced whole. Raises OSError."""
    aside = directory.with_name(directory.name + ASIDE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(
        {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()},
        aside / WEIGHTS,
        metadata={"format": "pt"},
    )
    (aside / CONFIG).write_text(json.dumps(config.peft(str(model_dir.resolve())), indent=2), encoding="utf-8")
    rename_into_place(aside, directory, durable=True)


def digest_of(exported: Iterable[tuple[str, Tensor]]) -> str:
    """Return SHA-256 over the names and the SHA-256 of each tensor, in any order. No tensor is kept for it."""
    sums = {
        name: hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().data).digest()
        for name, tensor in exported
    }
    total = hashlib.sha256()
    for name, of_tensor in sorted(sums.items()):
        total.update(name.encode() + of_tensor)
    return total.hexdigest()


def first_matrix(name: str, rank: int, columns: int) -> Tensor:
    """Return a new A, as PEFT draws it: uniform within 1 / sqrt(columns), from a generator seeded with ``name``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    bound = columns**-0.5
    return torch.empty(rank, columns, dtype=torch.float32, device="cpu").uniform_(
        -bound, bound, generator=torch.Generator("cpu").manual_seed(seed)
    )
