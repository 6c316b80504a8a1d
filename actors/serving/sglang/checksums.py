"""Checksum reports from SGLang's checksums: the Hugging Face tensors of which each of its parameters is made.

On CPU SGLang returns the SHA-256 of a parameter; on GPUs, and for each of several ranks, a number of its own that is not compared here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.format.checksums import ChecksumReport, Part

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's parameters that hold several tensors, one after the other."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")
VOCAB_ROWS = 64
"""Embedding and output projection are padded with rows of zeros to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a model's tensors in a server."""

    dtype: str
    padding: int
    """Number of zeros behind the embedding, and behind the output projection."""
    not_comparable: str
    """Why its checksums cannot be compared; "" = they can."""


def layout_of(info: JsonMapping, *, vocab_size: int, hidden_size: int, on_cpu: bool = True) -> Layout:
    """Return the layout for /server_info and the model's configuration; ``on_cpu``: this release computes checksums on CPU."""
    reason, dtype = "", str(info.get("dtype"))
    if info.get("device") != "cpu":
        reason = f"on {info.get('device')} SGLang computes them in a way of its own"
    elif not on_cpu:
        reason = f"SGLang {info.get('version')} computes none on CPU"
    elif int(info.get("tp_size") or 1) > 1:
        reason = f"each of {info.get('tp_size')} ranks has a part of every tensor"
    elif dtype not in DTYPES:
        reason = f"want dtype {', '.join(DTYPES)}, got {dtype}"
    return Layout(dtype=dtype, padding=-vocab_size % VOCAB_ROWS * hidden_size, not_comparable=reason)


def report_of(checksums: Mapping[str, str], layout: Layout) -> ChecksumReport:
    """Return the report on the tensors as they were sent, for the checksums of /weights_checker."""
    dtype, padding, sums = layout.dtype, layout.padding, dict(checksums)
    sums.setdefault(HEAD, sums[EMBEDDING])  # tied: one parameter
    parts = (
        Part(names=_names(name), dtype=dtype, sum=sum, zeros=padding if name in (EMBEDDING, HEAD) else 0) for name, sum in sums.items()
    )
    return ChecksumReport(scheme="sha256", parts=tuple(parts))


def _names(parameter: str) -> tuple[str, ...]:
    before, _, kind = parameter.rpartition(".")
    owner, _, last = before.rpartition(".")
    return tuple(f"{owner}.{name}.{kind}" for name in FUSED[last]) if last in FUSED else (parameter,)
