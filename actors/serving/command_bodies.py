"""Bodies of the commands of an engine: SGLang's names, one struct each, decoded by ``tidemill.actors.http_api``."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.http_api import decode
from tidemill.actors.serving.port import COMMAND_S
from tidemill.actors.serving.updates import KV_CACHE, WEIGHTS
from tidemill.weightstore.errors import WeightstoreError
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.format.manifest import TensorSpec

MAX_S = 1e6
"""Maximum time limit in seconds that a request may set."""
PAUSE_MODES = ("abort", "retract", "in_place")
"""Modes of SGLang's /pause_generation: end every response, or continue all later; retract also frees their cache."""

_Seconds = Annotated[float, Meta(gt=0, le=MAX_S)]
_Port = Annotated[int, Meta(ge=1, lt=1 << 16)]


class UpdateBody(Struct, kw_only=True):
    """The fields that the commands of a weight update share."""

    weight_version: str | int | None = None
    """SGLang's versions are strings; ours are numbers in them."""
    group_name: str = "weight_update_group"
    timeout_s: _Seconds = COMMAND_S
    adapter: AdapterHeader | None = None
    """The adapter that a push has; None = a push of weights."""

    def __post_init__(self) -> None:
        if self.weight_version is not None:
            _number(self.weight_version)

    @property
    def version(self) -> int | None:
        return None if self.weight_version is None else _number(self.weight_version)


class JoinBody(UpdateBody, kw_only=True):
    """Body of /init_weights_update_group."""

    master_address: str
    master_port: _Port
    rank_offset: int
    world_size: int
    backend: str = "nccl"


class BucketBody(UpdateBody, kw_only=True):
    """Body of /update_weights_from_distributed: the tensors that the next messages of the process group have."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    load_format: str | None = None
    """``flattened_bucket``: one message has all of them; None = each has a message."""

    def __post_init__(self) -> None:
        UpdateBody.__post_init__(self)
        if self.load_format not in (None, "flattened_bucket"):
            raise ValueError(f"load_format: want null or flattened_bucket, got {self.load_format!r:.80}")
        lengths = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(lengths)) > 1:
            raise ValueError("names, dtypes, shapes: want equal lengths, got {}, {}, {}".format(*lengths))

    def specs(self) -> list[TensorSpec]:
        """Return the tensors announced. Raises UpdateRefused for values that no tensor can have."""
        try:
            return [
                TensorSpec(name=name, shape=tuple(shape), dtype=dtype.removeprefix("torch."))
                for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
            ]
        except (WeightstoreError, TypeError, ValueError) as error:
            raise UpdateRefused(str(error)) from error


class PushBody(UpdateBody, kw_only=True):
    """Body of /receive_push, a whole weight update. The buckets come over its group, unless they name another."""

    buckets: list[dict[str, Any]]
    serve: bool = False

    def each_bucket(self) -> list[BucketBody]:
        """Return the buckets, in the order of their messages. Raises BadRequest."""
        return [
            decode({"group_name": self.group_name, **bucket}, BucketBody, f"buckets[{place}]")
            for place, bucket in enumerate(self.buckets)
        ]


class DirectoryBody(UpdateBody, kw_only=True):
    """Body of /update_weights_from_disk."""

    model_path: str


class AdapterBody(UpdateBody, kw_only=True):
    """Body of /load_lora_adapter and /unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: str = ""
    """Directory of an adapter in PEFT's format."""


class PauseBody(Struct, kw_only=True):
    """Body of /pause_generation."""

    mode: str = "abort"

    def __post_init__(self) -> None:
        if self.mode not in PAUSE_MODES:
            raise ValueError(f"mode: want one of {', '.join(PAUSE_MODES)}, got {self.mode!r:.80}")


class MemoryBody(Struct, kw_only=True):
    """Body of /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[frozenset[str], Meta(min_length=1)] | None = None
    """Kinds of memory; None = all of them."""

    def __post_init__(self) -> None:
        if unknown := (self.tags or frozenset()) - {WEIGHTS, KV_CACHE}:
            raise ValueError(f"tags: want null, or some of {KV_CACHE}, {WEIGHTS}, got {min(unknown)!r:.80}")

    @property
    def kinds(self) -> frozenset[str]:
        return self.tags or frozenset({WEIGHTS, KV_CACHE})


class ChecksumBody(Struct, kw_only=True):
    """Body of /weights_checksums: of the served weights, of the base of their adapter, or of the open update."""

    of: str = "served"

    def __post_init__(self) -> None:
        if self.of not in ("served", "base", "update"):
            raise ValueError(f"of: want served, base or update, got {self.of!r:.80}")


class CheckerBody(Struct, kw_only=True):
    """Body of /weights_checker."""

    action: str

    def __post_init__(self) -> None:
        if self.action != "checksum":
            raise ValueError(f"action: want checksum, got {self.action!r:.80}")


class AbortBody(Struct, kw_only=True):
    """Body of /abort_request: one request or response, or all of them."""

    rid: str | None = None
    abort_all: bool = False

    def __post_init__(self) -> None:
        if not self.rid and not self.abort_all:
            raise ValueError('rid: want {"rid": "..."} or {"abort_all": true}, got neither')


def _number(version: str | int) -> int:
    try:
        number = int(version)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f'weight_version: want a number >= 0 as a string, like "3", got {version!r:.80}')
    return number
