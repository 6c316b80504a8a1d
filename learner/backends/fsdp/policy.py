"""The policy of the FSDP2 backend: a model of transformers whose weights are sharded over all ranks, and its passes.

    row -> root: layers -> hidden states -> ``finish``, where the output weight is whole -> loss -> backward

Shape letters: T = tokens of a packed row, H = hidden size, V = vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tidemill.learner.backends.fsdp import weights
from tidemill.learner.backends.fsdp.lora import Adapters, add_adapters, tuned
from tidemill.learner.backends.fsdp.model import Changed, FsdpModel, Place, open_model, unchanged
from tidemill.learner.backends.fsdp.opening import names_of_heads
from tidemill.learner.backends.fsdp.replay import Replay
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.logprobs import log_probs_and_entropy
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import ROLLOUT
from tidemill.learner.settings.optimizer import Tuning
from tidemill.learner.trainer.backend import Finish, Head, Input, ModelInput, Result
from tidemill.learner.trainer.exports import digest_of, digest_of_kept
from tidemill.learner.trainer.memory import Memory

NO_TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPolicy:
    """A model on this rank, with its part of every weight."""

    root: FsdpModel
    parallel: Parallel
    dtype: str
    """float32 | bfloat16: of the passes. Weights, gradients and their sums are float32."""
    model_dir: Path
    """Directory of the weights with which a new run begins."""
    memory: Memory = field(default_factory=Memory)
    """Memory of the weights, their gradients and the optimizer's state."""
    routing: Replay
    replays: bool = False
    """The experts of tokens are recorded or given, and taken again."""
    adapters: Adapters | None = None
    """The only parameters that are trained; None = those of the model itself."""
    fused: bool = False
    """Log-probs by kernels of Triton."""
    kept: str = ""
    """Digest of the tensors of the files that are not trained; empty = none."""

    @property
    def in_place(self) -> bool:
        """True: FSDP gathers from memory of its own, so other weights are copied into it."""
        return True

    @property
    def counts_tokens(self) -> bool:
        """True with heads for further tokens; there is no balancing loss, and no bias of a router moves."""
        return self.root.num_further > 0

    @property
    def vocab_size(self) -> int:
        return int(self.root.config.vocab_size)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model of transformers, whose parameters are DTensors."""
        return (self.root.transformer,)

    @property
    def begins_apart(self) -> bool:
        return self.adapters is not None and self.adapters.loaded

    @property
    def obstacle(self) -> str:
        if self.replays:
            return "the experts of each copy of a token are replayed"
        if self.root.num_further:
            return "heads for further tokens read the next tokens of each copy"
        return self.root.prefix_obstacle

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, as DTensors, and buffers that belong to a checkpoint, under the names of transformers."""
        yield from weights.named_weights(self.root.transformer)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the live parts of this rank: parameters, and buffers that belong to a checkpoint."""
        yield from self.root.named_weights()

    def weights_changed(self) -> None:
        """Let the next pass gather weights that were written outside of an optimizer step."""
        self.root.weights_changed()

    @property
    def names_of_heads(self) -> frozenset[str]:
        """Names of the weights of heads for further tokens, which are trained."""
        return names_of_heads(self.root.transformer)

    def load_reference(self, directory: Path) -> None:
        """Load the weights of another model directory of the same shape, but for heads. Raises ConfigRefused."""
        self.root.load(directory, further=False)

    def load_initial(self) -> None:
        self.root.load(self.model_dir)

    # ---- passes

    def ready(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: torch needs no preparation here."""
        return nullcontext()

    def head(self) -> Head:
        """Return the output layer, whole; valid inside ``finish``."""
        return Head(
            weight_VH=self.root.head_weight(), fused=self.fused, scale=self.root.head.scale, cap=self.root.head.cap
        )

    def run(self, rows: Sequence[Input], finish: Finish[Input, Result], *, forward_only: bool = False) -> list[Result]:
        """Run every row through the model, forward and (unless ``forward_only``) backward, one after the other.

        Gradients are added up over rows and ranks: each backward pass reduces them to the ranks' parts, so no rank has
        the gradient of the whole model. All ranks have equally many rows.
        """
        results = []
        with torch.no_grad() if forward_only else nullcontext():
            for row in rows:
                with self.routing.row(row.packed):
                    loss, result = self.root(row.tokens_T, row.packed, partial(finish, row))
                    if not forward_only:
                        loss.backward()
                results.append(result)
        if forward_only:
            # Without a backward pass the root stays whole, and the next pass would not see weights that an optimizer
            # or a copy has written in the meantime.
            self.root.weights_changed()
        return results

    def further_log_probs(
        self, row: ModelInput, hidden_TH: Tensor, predicts: Callable[[int], Tensor]
    ) -> Iterator[Tensor]:
        """Yield for each head the log-probs of the tokens that it predicts, [N]; inside ``finish``."""
        head = self.head()
        for depth, states_TH in enumerate(self.root.further_states(hidden_TH, row.tokens_T, row.packed), 1):
            places_N = predicts(depth).nonzero()[:, 0]
            if not len(places_N):  # the graph stays, because other ranks gather the head in their backward pass
                yield states_TH.sum(dtype=torch.float32)[None] * 0
                continue
            targets_N = row.tokens_T.roll(-1 - depth)[places_N]
            inputs = (states_TH[places_N], head.weight_VH.detach(), targets_N)
            yield log_probs_and_entropy(*inputs, fused=head.fused, scale=head.scale, cap=head.cap)[0]

    def gather(self) -> None:
        """Do nothing: a step changes the parts of each rank, and the next pass gathers them."""

    def moving_biases(self) -> list[Tensor]:
        """Return none: no bias of a router moves."""
        return []

    # ---- export

    def export(self, *, without_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights under the names of the files, adapters merged into them; collective over all ranks.
        Raises MemoryReleased.
        """
        self.memory.want("the export of weights")
        yield from self.root.export(changed=self._changed(without_adapters=without_adapters))

    def export_part(self, senders: int, *, without_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield those of them that this rank sends; collective over the first copy. Raises MemoryReleased."""
        self.memory.want("the export of weights")
        yield from self.root.export_part(senders, changed=self._changed(without_adapters=without_adapters))

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices of all adapters under PEFT's names; collective over all ranks."""
        assert self.adapters is not None, "there are no adapters"
        yield from self.adapters.export()

    def help_export_adapters(self) -> None:
        for _ in self.adapters.export() if self.adapters is not None else ():
            pass

    def digest(self) -> str:
        """Return SHA-256 over names and content of the exported tensors, the same for every number of ranks."""
        return digest_of(self.export())

    def _changed(self, *, without_adapters: bool) -> Changed:
        return unchanged if self.adapters is None or without_adapters else self.adapters.merged


def build_policy(
    model_dir: Path,
    *,
    dtype: str,
    parallel: Parallel,
    memory: Memory | None = None,
    tuning: Tuning = NO_TUNING,
    attention: str = "auto",
    recompute: bool = False,
    replays: bool = False,
    given: bool = False,
    fused: bool = False,
    value_head: bool = False,
    further: bool = False,
    family: str = "",
) -> FsdpPolicy:
    """Build the model of a directory, divided over all ranks, in ``memory``; collective. Raises ConfigRefused.

    ``replays``, ``given``: of the experts (``Replay``). ``fused``: log-probs by kernels of Triton. The others: as of
    ``open_model``.
    """
    memory = memory or Memory()
    with memory.region():
        root = open_model(
            model_dir,
            dtype=dtype,
            place=Place.of(parallel),
            attention=attention,
            recompute=recompute,
            value_head=value_head,
            further=further,
            freeze=tuning.freeze,
            family=family,
            prepare=partial(add_adapters, config=tuning.lora),
        )
        adapters = tuned(root, tuning)
    if replays:
        _require_packed(root, ROLLOUT if given else "old")
    return FsdpPolicy(
        root=root,
        parallel=parallel,
        dtype=dtype,
        model_dir=model_dir,
        memory=memory,
        routing=Replay(root.transformer, replays=replays, given=given),
        replays=replays,
        adapters=adapters,
        fused=fused,
        kept="" if value_head else digest_of_kept(model_dir, parallel.device),
    )


def _require_packed(root: FsdpModel, replay: str) -> None:
    """Raise ConfigRefused if rows are padded, in which experts of tokens are not replayed."""
    if not root.findings.packed:
        want = f"none for {root.family}, whose sequences are computed in padded rows"
        raise ConfigRefused("learner.routing_replay", want, replay)
