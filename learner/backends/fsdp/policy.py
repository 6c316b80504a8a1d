"""The policy of the FSDP2 backend: a model of transformers whose weights are sharded over all ranks; its passes, and
the experts of each token in them: recorded or given, and taken again in training (routing replay).

    row -> root: layers -> hidden states -> ``finish``, where the output weight is whole -> loss -> backward

    R2: old log-probs: record -> ``PackedRow.experts`` -> training: replay, forward and recomputed
    R3: the samples' experts -> ``PackedRow.experts`` -> old log-probs and training: replay

The last ``topk`` of a router over all its experts is its choice. Inside the forward pass of a router that ``topk``
gives the known experts with their own values, so weights and gradients are those of the current router.
Sources: Zheng et al. 2025 (Group Sequence Policy Optimization), section 5.3; Ma et al. 2025 (arXiv 2510.11370).
Shape letters: T = tokens of a packed row, N = tokens that routers get, with padding where rows are padded, H = hidden
size, V = vocabulary, E = layers with experts, K = experts of a token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidemill.bus.wire.model_values import language_values
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.backends.fsdp import weights
from tidemill.learner.backends.fsdp.lora import Adapters, add_adapters, tuned
from tidemill.learner.backends.fsdp.model import Changed, FsdpModel, Place, open_model, unchanged
from tidemill.learner.backends.fsdp.opening import PaddedRow, names_of_heads
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.logprobs import log_probs_and_entropy
from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.lora import Tuning
from tidemill.learner.trainer.exports import digest_of, digest_of_kept
from tidemill.learner.trainer.memory import Memory
from tidemill.learner.trainer.port import Finish, Head, Input, ModelInput, ReplayModes, Result

_TOPK = (torch.topk, torch.Tensor.topk)


class Replay(ReplayModes):
    """The routers of one model, which runs its rows one after the other, each forward and backward."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        replays: bool = False,
        given: RoutedShape | None = None,
        packed: bool = True,
    ) -> None:
        """``given``: sizes of the experts that the rows have already; None = they have none. ``packed``: the model
        computes packed rows, else padded ones. Raises ConfigRefused for a model without known routers, or with others
        than those of ``given``.
        """
        super().__init__(given=given is not None)
        self._row: PackedRow | None = None
        self._packed = packed
        self._padded: PaddedRow | None = None
        self._routers = [_Router(module) for module in model.modules() if _is_router(module)] if replays else []
        if replays and not self._routers:
            want = "none for a model without routers that transformers names"
            raise ConfigRefused("learner.routing_replay", want, type(model).__name__)
        if given is not None:
            _require_same(given, model, self._routers)
        for place, router in enumerate(self._routers):
            router.module.forward = partial(self._routed, place, router.module.forward)

    def own(self, experts_TEK: Tensor) -> tuple[Tensor, ...]:
        """Return the given experts, [T, layers with experts, K], of this model's layers, [T, K] each. Raises
        ConfigRefused for those of another number of layers: the layers of a wrong file would be shifted in silence.
        """
        if not self._given:
            return ()
        if experts_TEK.shape[1:] != (shape := (len(self._routers), self._routers[0].top_k)):
            want = f"experts of {shape[0]} layers and {shape[1]} experts of a token, as the model has"
            raise ConfigRefused("learner.routing_replay", want, f"{experts_TEK.shape[1]} and {experts_TEK.shape[2]}")
        return tuple(experts_TEK[:, place].contiguous() for place in range(len(self._routers)))

    def observe(self, ranks: Parallel) -> None:
        """Do nothing: routers of transformers give no affinities before groups and bias, so rows record no routing."""

    @contextmanager
    def row(self, packed: PackedRow) -> Iterator[None]:
        """Record or replay one row's forward and backward pass, which happen inside the context."""
        self._row = packed
        if self._routers and not self._packed:
            padded = PaddedRow.of(packed)
            self._padded = padded._replace(places_T=padded.places_T.to(packed.position_ids_T.device))
        try:
            yield
        finally:
            self._row = self._padded = None

    def _routed(self, place: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        row, router = self._row, self._routers[place]
        if row is None or not self._mode or (self._mode == "replay" and not row.experts):
            return forward(*arguments, **named)
        choice = _Choice(router, self._of_router(row.experts[place]) if self._mode == "replay" else None)
        with choice:
            result = forward(*arguments, **named)
        if choice.chosen_NK is None:
            want = f"none for a model whose {type(router.module).__name__} chooses experts without torch.topk"
            raise ConfigRefused("learner.routing_replay", want, self._mode)
        if self._mode == "record":
            chosen_TK = self._of_row(choice.chosen_NK.detach().to(torch.int16))
            row.experts = (*row.experts[:place], chosen_TK, *row.experts[place + 1 :])
        return result

    def _of_router(self, experts_TK: Tensor) -> Tensor:
        """Return the experts of a row's tokens in the places in which routers get them; those of padding are unknown,
        and nothing reads its outputs.
        """
        if self._padded is None:
            return experts_TK
        experts_NK = experts_TK.new_full((self._padded.sequences * self._padded.longest, experts_TK.shape[1]), -1)
        return experts_NK.index_copy(0, self._padded.places_T, experts_TK)

    def _of_row(self, experts_NK: Tensor) -> Tensor:
        """Return the experts of a row's tokens by those of a router's."""
        return experts_NK if self._padded is None else experts_NK[self._padded.places_T]


class _Router:
    """A router of transformers and its sizes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module
        self.top_k = int(_first(self.module, ("top_k", "num_experts_per_tok")))
        # longcat_flash chooses among experts that do nothing, too, which this attribute of its routers counts.
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.num_experts = int(getattr(self.module, "n_routed_experts", None) or _first(self.module, names))


class _Choice(TorchFunctionMode):
    """Context in which a ``topk`` of a router over its experts gives the known ones, and is recorded."""

    def __init__(self, router: _Router, experts_NK: Tensor | None) -> None:
        """``experts_NK``: the known experts, -1 = not known; None = the router chooses all."""
        super().__init__()
        self._router, self._experts_NK = router, experts_NK
        self.chosen_NK: Tensor | None = None
        """Experts of the last ``topk``."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or give the known experts in the place of its choice."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or not self._chooses(args[0], result):
            return result
        values, own = result
        if self._experts_NK is not None:
            experts = self._experts_NK.reshape(own.shape)
            own = torch.where(experts < 0, own, experts.to(own.dtype))
            values = args[0].gather(-1, own)
        self.chosen_NK = own.reshape(-1, own.shape[-1])
        return torch.return_types.topk((values, own))

    def _chooses(self, scores: Tensor, result: tuple[Tensor, Tensor]) -> bool:
        # A router by groups has other topks before: of scores within a group, and of groups.
        return scores.shape[-1] == self._router.num_experts and result[1].shape[-1] == self._router.top_k


def _is_router(module: torch.nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router")


def _require_same(given: RoutedShape, model: torch.nn.Module, routers: Sequence[_Router]) -> None:
    """Raise ConfigRefused unless the routers are in these layers, with these numbers of experts."""
    paths = [path for path, module in model.named_modules() if _is_router(module)]
    layers = [int((re.search(r"\blayers\.(\d+)", path) or [0, -1])[1]) for path in paths]
    wanted = {(layer, given.num_experts, given.top_k) for layer in given.layers}
    found = {(layer, router.num_experts, router.top_k) for layer, router in zip(layers, routers, strict=True)}
    if wanted != found:
        form = "(layer, experts, experts of a token) by config.json"
        want = f"{form} as in the model of transformers, {sorted(found - wanted)} more"
        raise ConfigRefused("learner.routing_replay", want, f"{sorted(wanted - found)} more")


def _given_shape(model_dir: Path) -> RoutedShape:
    """Return the sizes of the experts that rows have. Raises ConfigRefused where config.json does not tell them."""
    values = language_values(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
    if (shape := RoutedShape.of(values)) is None:
        want = "old or none for a model whose layers with experts are not known"
        raise ConfigRefused("learner.routing_replay", want, values.get("model_type"))
    return shape


def _first(module: Any, names: Sequence[str]) -> Any:
    """Return the first of the attributes that a router or its configuration has."""
    for name in names:
        for owner in (module, getattr(module, "config", None)):
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
    if "num_experts" in names:
        return module.weight.shape[0]
    raise ConfigRefused("learner.routing_replay", f"none for a router without {names[0]}", type(module).__name__)


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
        """Yield the tensors that this rank sends; collective over the first copy. Raises MemoryReleased."""
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

    ``replays``, ``given``: of the experts (``Replay``), the latter if rows have them already. ``fused``: log-probs by
    kernels of Triton. The others: as of ``open_model``.
    """
    memory, shape = memory or Memory(), _given_shape(model_dir) if given else None
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
    return FsdpPolicy(
        root=root,
        parallel=parallel,
        dtype=dtype,
        model_dir=model_dir,
        memory=memory,
        routing=Replay(root.transformer, replays=replays, given=shape, packed=root.findings.packed),
        replays=replays,
        adapters=adapters,
        fused=fused,
        kept="" if value_head else digest_of_kept(model_dir, parallel.device),
    )
