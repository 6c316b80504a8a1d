"""The port of a backend: a model that is spread over the ranks, as the trainer and the processes use it.

    rows -> Policy.run -> hidden states of a row -> ``finish`` (reads ``Policy.head``) -> loss -> gradients -> Optimizer

A backend decides how a model is divided, how rows pass through it, and how its state is stored. It knows no loss, no
advantage and no metric. Every method is collective over all ranks unless it says otherwise.
Shape letters: T = tokens of a packed row, H = hidden size, V = this rank's part of the vocabulary, E = layers with
experts, K = experts of a token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.checkpoints.staged_files import HostCopies, Staged
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.memory import Memory
from tidemill.learner.trainer.optimizer import Optimizer

if TYPE_CHECKING:
    from tidemill.learner.trainer.backups import OtherModels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights and activations by the names in the settings."""


def named_dtype(dtype: object, where: str) -> str:
    """Return the name of a dtype in ``DTYPES``. Raises ConfigRefused for another; ``where``: the place that has it."""
    name = next((name for name, choice in DTYPES.items() if choice == dtype), "")
    if not name:
        raise ConfigRefused(where, f"weights in {' or '.join(DTYPES)}", str(dtype))
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Attributes of a row that a forward pass reads."""

    tokens_T: Tensor
    """Of this rank's part of the row."""
    packed: PackedRow
    """Layout of the whole row."""


Input = TypeVar("Input", bound=ModelInput)
Result = TypeVar("Result")
Finish = Callable[[Input, Tensor], tuple[Tensor, Result]]
"""(row, its hidden states [T, H], or with a value head its values [T, 1] in float32) -> (loss, result)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output layer, as the computation of log-probs takes it (``kernels/logprobs.py``)."""

    weight_VH: Tensor
    group: dist.ProcessGroup | None = None
    """Ranks with the other parts of the vocabulary, in order; None = this rank has all."""
    fused: bool = False
    """True if log-probs are computed by Triton kernels between the matrix products."""
    placeholder: bool = False
    """Return a gradient without values for a weight that has taken its own already."""
    scale: float = 1.0
    """Factor of the logits."""
    cap: float = 0.0
    """Bound of the logits, ``cap * tanh(scale * hidden @ weight.T / cap)``; 0 = none."""


class Adapters(Protocol):
    """Adapters of low rank: the only weights that are trained."""

    @property
    def config(self) -> LoraConfig:
        """Their settings."""

    def names(self, letter: str = "") -> list[str]:
        """Return the names of their matrices in ``Weights.named_weights``; ``letter``: of A or B alone."""

    def facts(self) -> JsonObject:
        """Return what a checkpoint records of them, by which another run's are refused."""


class Weights(Protocol):
    """The weights on this rank, for copies of them and other weights in their place."""

    @property
    def parallel(self) -> Parallel:
        """This rank's place."""

    @property
    def memory(self) -> Memory:
        """Memory of the weights, their gradients and the optimizer's state."""

    @property
    def model_dir(self) -> Path:
        """Directory of the model with which a new run begins."""

    @property
    def kept(self) -> str:
        """Digest of the tensors of the model's files that are not trained; empty = none."""

    @property
    def names_of_heads(self) -> frozenset[str]:
        """Names of the weights of heads for further tokens. Only their loss reads them, so copies for other passes are
        without them.
        """

    @property
    def adapters(self) -> Adapters | None:
        """The only weights that are trained; None = the model's own."""

    @property
    def in_place(self) -> bool:
        """True if other weights are copied into the tensors; False = ``Tensor.data`` may point to them for a pass."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the live tensors of this rank, parameters and buffers that training moves, in a fixed order."""

    def weights_changed(self) -> None:
        """Let the next pass see weights that were written outside of an optimizer step."""

    def load_reference(self, directory: Path) -> None:
        """Load the weights of another model directory of the same shape, except for the heads for further tokens.
        Raises ConfigRefused.
        """

    def load_initial(self) -> None:
        """Load the weights again that a new run begins with, before its adapters."""


class Exports(Protocol):
    """The weights under Hugging Face names, for engines and files."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights, with adapters merged into them, in a fixed order. Raises MemoryReleased.

        Collective over the ranks of one copy of the model. Tensors may be views on the live ones.
        """

    def export_part(self, senders: int, *, without_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank sends; all ranks run the iterator to its end. Raises MemoryReleased.

        ``senders``: ranks of each stage among which its layers are dealt out. ``without_adapters``: the frozen weights.
        """

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices of all adapters under PEFT's names. Rank 0 calls this; the other ranks call
        ``help_export_adapters`` meanwhile.
        """

    def help_export_adapters(self) -> None:
        """Take part in the collectives in which rank 0 exports the adapters, if there are any."""

    def digest(self) -> str:
        """Return SHA-256 over names and content of the exported tensors, the same for every layout."""


class Routing(Protocol):
    """The experts of the tokens (``PackedRow.experts``), to be recorded and taken again."""

    def own(self, experts_TEK: Tensor) -> tuple[Tensor, ...]:
        """Return the given experts of this rank's layers, [T, K] each; none where they are not replayed."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the experts that the routers choose for each row inside the context. Rows that came with experts keep
        these.
        """

    def given(self) -> AbstractContextManager[None]:
        """Send tokens to the experts that their rows came with; the routers choose where rows came with none."""

    def replaying(self) -> AbstractContextManager[None]:
        """Send tokens to the experts that are recorded, or that their rows came with; routers choose for all others."""

    def observe(self, ranks: Parallel) -> None:
        """Keep in ``PackedRow.routed`` of every row from now on where its last pass sent its tokens."""


class Policy(Weights, Exports, Protocol):
    """A model that is trained, on this rank: the policy, or a critic with a value head."""

    @property
    def dtype(self) -> str:
        """The key of ``DTYPES`` for activations."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, as the model's files have it."""

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The model's modules on this rank, in the order of the layers, as hooks of users get them."""

    @property
    def routing(self) -> Routing:
        """The experts of the tokens."""

    @property
    def counts_tokens(self) -> bool:
        """True if every computed token moves the policy, whatever its loss: by the balance of experts."""

    @property
    def begins_apart(self) -> bool:
        """True if the weights of a new run differ from the weights of the model directory."""

    @property
    def obstacle(self) -> str:
        """Reason why the prompts that samples share cannot be computed once; empty = they can."""

    def ready(self) -> AbstractContextManager[None]:
        """Return the context in which passes run and optimizer steps are taken. It is not re-entrant."""

    def run(
        self, rows: Sequence[Input], finish: Finish[Input, Result], *, forward_only: bool = False
    ) -> list[Result] | None:
        """Run every row through the model, forward and (unless ``forward_only``) backward, inside ``ready``.

        Gradients of the losses are added up over rows and data-parallel ranks: a sum, no mean. All ranks have equally
        many rows. Returns the results in the order of the rows on the last stage, and None on the others.
        """

    def head(self) -> Head:
        """Return the output layer; valid inside ``finish``, where its weight is whole or this rank's part. Not
        collective.
        """

    def further_log_probs(
        self, row: ModelInput, hidden_TH: Tensor, predicts: Callable[[int], Tensor]
    ) -> Iterator[Tensor]:
        """Yield for each head for further tokens (MTP) that is trained the log-probs of the tokens it predicts, [N].

        Head k, counted from 1, predicts the token k + 1 places further on, at the N places where ``predicts(k)``, [T],
        is true. Where it is true nowhere, it yields one 0 that depends on the head, so that every rank runs the same
        backward pass. Valid inside ``finish``; gradients flow into the heads alone.
        """

    def gather(self) -> None:
        """Complete the weights that optimizer steps have left to the next forward pass, before export and copies."""

    def moving_biases(self) -> list[Tensor]:
        """Return the buffers of this rank that move with a backward pass, not by the optimizer. Not collective."""


P = TypeVar("P", bound=Policy)
O = TypeVar("O", bound=Optimizer)


class Backend(Protocol[P, O]):
    """One way to train models, from the processes' point of view. Opened by ``learner.backends.choice``."""

    def join(self, learner: LearnerConfig, *, device: torch.device, timeout_s: float) -> Parallel:
        """Join the other ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Raises ValueError for another number."""

    def leave(self) -> None:
        """Destroy the process groups, without waiting for the other ranks."""

    @property
    def damaged(self) -> tuple[type[Exception], ...]:
        """Errors of damaged checkpoints that its libraries raise beside the errors of torch."""

    def open_policy(
        self,
        learner: LearnerConfig,
        model_dir: Path,
        parallel: Parallel,
        *,
        dtype: str,
        initial: Path | None = None,
    ) -> P:
        """Build the model of the settings with the directory's weights. Raises ConfigRefused.

        ``initial``: checkpoint of a backend's own training software that has the initial weights instead.
        """

    def open_value_model(self, learner: LearnerConfig, policy: P, model_dir: Path) -> P:
        """Build the critic's model, with a value head of zeros, in the policy's memory. Raises ConfigRefused."""

    def open_optimizer(self, policy: P, config: OptimizerConfig, *, steps: int, offload: bool) -> O:
        """Return the optimizer of a policy for ``steps`` steps. ``offload``: its state is in host memory. Raises
        ConfigRefused.
        """

    def stage(
        self,
        directory: Path,
        *,
        step: int,
        policy: P,
        optimizer: O,
        others: "OtherModels",
        numbers: Mapping[str, float],
        copies: HostCopies | None,
    ) -> Staged:
        """Plan this rank's part of the state after ``step`` for ``directory`` (existing and empty).

        With ``copies`` the state may change as soon as this returns; without, only after it is written. ``numbers``:
        scalars of the algorithm, equal on all ranks; ``load`` returns them. Raises CheckpointUnwritten, MemoryReleased.
        """

    def load(
        self,
        directory: Path,
        *,
        policy: P,
        optimizer: O,
        others: "OtherModels",
        files: CheckpointFiles | None,
    ) -> tuple[int, dict[str, float]]:
        """Load a state that any number of ranks has saved. Returns its step and numbers.

        With ``files``, which may be on other nodes, the directory needs only the index. Raises CheckpointCorrupt for
        another format or a range that is intact nowhere, ConfigRefused for a checkpoint of another model or backend.
        """

    def load_weights(self, directory: Path, *, policy: P, optimizer: O) -> int:
        """Load the weights of a checkpoint alone; the optimizer has no state then. Returns its step. Raises
        ConfigRefused.
        """

    def read_model(
        self, checkpoint: Path, model_dir: Path, parallel: Parallel, *, code_path: str = ""
    ) -> tuple[P, int]:
        """Return a model with the weights of a checkpoint, in one process on the CPU, and its step.

        ``code_path``: of the user's bridge or family. Raises ConfigRefused for another model.
        """

    def write_checkpoint(
        self, directory: Path, model_dir: Path, parallel: Parallel, *, dtype: str, code_path: str = ""
    ) -> None:
        """Write the weights of a model directory as a checkpoint without a manifest. Raises ConfigRefused, OSError."""

    def module_outputs(self, policy: P, prompts: Sequence[Sequence[int]], names: str) -> dict[str, NDArray[np.float32]]:
        """Return outputs of modules for single prompts, ``<prompt>.<module>`` -> [T, W], on rank 0."""


AnyBackend = Backend[Any, Any]


Mode = Literal["", "record", "replay"]
"""Nothing; keep the experts that the routers choose; send tokens to the experts that their row has."""


class ReplayModes:
    """The passes of ``trainer.port.Routing`` as modes, which the routers of a backend follow."""

    def __init__(self, *, given: bool) -> None:
        """``given``: the rows have their experts already."""
        self._given = given
        self._mode: Mode = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._in("replay" if self._given else "record"):
            yield

    @contextmanager
    def given(self) -> Iterator[None]:
        with self._in("replay" if self._given else ""):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with self._in("replay"):
            yield

    @contextmanager
    def _in(self, mode: Mode) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = ""
            self._clear()

    def _clear(self) -> None:
        """Forget what a pass has left in the routers."""
