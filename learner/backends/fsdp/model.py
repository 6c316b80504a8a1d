"""A model of transformers, sharded over its ranks by fully_shard, which computes packed rows.

    tokens of a row -> layers, each gathered for its own pass -> hidden states -> ``finish`` -> loss

``finish`` runs inside the forward pass of the root, where the weight of the output layer is whole: log-probs are
computed there without the logits of all tokens. Shape letters: T = tokens of a row, H = hidden size, V = vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tidemill.learner.backends.fsdp import weights
from tidemill.learner.backends.fsdp.family import load_family
from tidemill.learner.backends.fsdp.opening import (
    Transformer,
    add_heads,
    build,
    further_states,
    heads_of,
    names_of_heads,
    read_config,
)
from tidemill.learner.backends.fsdp.self_test import Findings, Head, findings_of
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import FLASH_MULTIPLE, SDPA, choose_attention, this_site
from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.model_files import HEADS_SETTING, count_heads
from tidemill.learner.layout.parallel import Parallel, from_first
from tidemill.learner.layout.sizes import Dealt

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Result = TypeVar("Result")
Changed = Callable[[str, Tensor], Tensor]


def unchanged(name: str, tensor: Tensor) -> Tensor:
    """Return a weight as it is."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the parts of a model are."""

    device: torch.device
    group: dist.ProcessGroup
    """Ranks that have parts of the weights: all."""
    mirrored: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    """Ranks with the same parts, and ranks over which a weight is divided (HSDP); None = it is divided over all."""

    @classmethod
    def of(cls, parallel: Parallel) -> "Place":
        """Return the place of a rank."""
        mirrors, shards = parallel.mirror_group, parallel.shard_group
        mirrored = (mirrors, shards) if mirrors is not None and shards is not None else None
        return cls(device=parallel.device, group=parallel.dp_group, mirrored=mirrored)

    def from_first(self, make: Callable[[], Result]) -> Result:
        """Return what ``make`` returns on the rank that reads files, on all ranks. Collective."""
        return from_first(make, group=self.group, device=self.device)

    @property
    def in_first_copy(self) -> bool:
        """True if this rank's parts belong to the first copy of the model, which is exported."""
        return self.mirrored is None or dist.get_rank(self.mirrored[0]) == 0

    def mesh(self) -> DeviceMesh:
        """Return all ranks as a mesh: of one dimension, or of copies and parts."""
        if self.mirrored is None:
            return DeviceMesh.from_group(self.group, self.device.type)
        copies = dist.get_world_size(self.mirrored[0])
        ranks = torch.arange(dist.get_world_size(self.group)).view(copies, -1)
        return DeviceMesh.from_group(
            list(self.mirrored), self.device.type, mesh=ranks, mesh_dim_names=("copies", "parts")
        )


class FsdpModel(torch.nn.Module):
    """The root of a sharded model. Its parameters are float32 parts, DTensors, under ``transformer.<name>``."""

    def __init__(
        self, transformer: Transformer, findings: Findings, place: Place, *, dtype: torch.dtype, is_critic: bool
    ) -> None:
        super().__init__()
        self.transformer, self.config = transformer.model, transformer.model.config.get_text_config()
        self.findings, self.dtype, self.is_critic = findings, dtype, is_critic
        self._passes, self._place = transformer, place
        self._form = weights.FileForm()

    @property
    def family(self) -> str:
        """transformers' ``model_type``."""
        return str(self.transformer.config.model_type)

    @property
    def num_further(self) -> int:
        """Number of heads for further tokens that are trained."""
        return len(heads_of(self.transformer))

    @property
    def head(self) -> Head:
        """Scale and cap of the logits."""
        return self.findings.head

    @property
    def prefix_obstacle(self) -> str:
        """Why common beginnings of sequences cannot be computed once; empty = they can."""
        if not self.findings.packed:
            return f"{self.family} is computed in padded rows"
        if self.findings.mixers:
            return f"{self.family} has layers that carry a state from token to token"
        return "" if self._passes.row.kernel == SDPA else f"attention {self._passes.row.kernel} takes whole sequences"

    def forward(self, tokens_T: Tensor, packed: PackedRow, finish: Callable[[Tensor], Result]) -> Result:
        """Return ``finish(hidden_TH)`` of a row's hidden states, or of a critic's values, [T, 1] float32.

        Run the backward pass of a row before the next row: checkpointed layers read its layout again. After a pass
        without gradient call ``weights_changed``: else the root keeps its whole weights, and the next pass does not see
        what was written into the parts.
        """
        hidden_TH = self._passes.hidden_states(tokens_T, packed)
        if self.is_critic:
            return finish(hidden_TH.float() @ self.head_weight().float().t())
        return finish(hidden_TH)

    def head_weight(self) -> Tensor:
        """Return the weight of the output layer, [V, H], or [1, H] of a critic. It is whole inside ``finish`` only."""
        weight: Tensor = self.transformer.get_output_embeddings().weight
        return weight

    def further_states(self, hidden_TH: Tensor, tokens_T: Tensor, packed: PackedRow) -> Iterator[Tensor]:
        """Yield the states [T, H] of each head for further tokens; inside ``finish``."""
        assert packed.position_ids_T is not None
        yield from further_states(self.transformer, hidden_TH, tokens_T, packed.position_ids_T)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the weights, live, under transformers' names, with biases of routers.

        Call ``weights_changed`` after writing into them.
        """
        self.weights_changed()  # else the root may have its whole weights in the places of the parts
        yield from ((name, weights.local(tensor)) for name, tensor in weights.named_weights(self.transformer))

    def weights_changed(self) -> None:
        """Free the whole weights that a pass left on the root, so that the next pass gathers the parts again."""
        cast(FSDPModule, self).reshard()

    def export(self, changed: Changed = unchanged) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the files, layer by layer. Collective.

        They are in the dtype of the computation, and in float32 where the files have that for a tensor although most of
        theirs are narrower. ``changed``: gets each weight by its name in memory, in the same order on all ranks, and
        returns the one to export.
        """
        self.weights_changed()
        yield from self._form.export(self.transformer, dtype=self.dtype, device=self._place.device, changed=changed)

    def export_part(self, senders: int, changed: Changed = unchanged) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of ``export`` that this rank sends. All ranks of the first copy run it to its end."""
        dealt, rank = Dealt(senders), dist.get_rank(self._place.group)
        exported = self.export(changed) if self._place.in_first_copy else iter(())
        yield from ((name, tensor) for name, tensor in exported if dealt.sender(name) == rank)

    def file_names(self, name: str) -> list[str]:
        """Return the names in the files of a parameter by its name in memory; several for experts in one tensor."""
        return self._form.file_names(self.transformer, name)

    def load(self, directory: Path, *, further: bool = True) -> None:
        """Read the weights of a directory of this model into the live parts. Collective.

        A critic's value head becomes 0. Tensors that no file has (adapters) stay, and without ``further`` the heads for
        further tokens, which need not be in the files. Raises ConfigRefused, on all ranks.
        """
        sources: list[Any] = []
        heads = frozenset() if further else names_of_heads(self.transformer)

        def read() -> weights.FileForm:
            num_heads = self.num_further if further else 0
            sources.append(weights.read_model(read_config(directory), directory, heads=num_heads))
            if self.is_critic:
                give_value_head(sources[0])
            if self._form.names:
                weights.refuse_other_tensors(self.transformer, sources[0], self._form.names - heads, directory)
            return weights.FileForm.of(sources[0], directory)

        place = self._place
        self.weights_changed()
        form = place.from_first(read)
        if further:
            self._form = form
        weights.distribute(
            self.transformer, sources[0] if sources else None, form.names, device=place.device, group=place.group
        )
        self.weights_changed()


def open_model(
    model_dir: Path,
    *,
    dtype: str,
    place: Place,
    attention: str = "auto",
    recompute: bool = False,
    value_head: bool = False,
    prepare: Callable[[Any], None] | None = None,
    further: bool = False,
    freeze: Sequence[str] = (),
    family: str = "",
) -> FsdpModel:
    """Return the model of a directory, divided over the ranks of a place. Collective.

    ``dtype``: of the computation, float32 or bfloat16; weights and the sums of their gradients are float32. Gradients
    are sums over the ranks, which run the same number of passes. ``attention``: ``learner.attention``. ``recompute``:
    compute each layer again in the backward pass. ``value_head``: for a critic. ``prepare``: gets the model of
    transformers, without memory, before it is divided, and may freeze parameters and add some; these have no values
    then. ``further``: with the heads for further tokens (MTP) of the files, not all of which ``freeze`` may name.
    ``family``: ``learner.family``. Raises ConfigRefused, on all ranks, FunctionRefused.
    """
    rules = load_family(family)
    config = read_config(model_dir)
    findings = place.from_first(lambda: findings_of(config, place.device, rules))
    rows = "packed" if findings.packed else "padded"
    log.info("model_family type=%s rows=%s reason=%s", config.model_type, rows, findings.reason)
    heads = place.from_first(lambda: _num_heads(config, model_dir, findings, freeze)) if further else 0
    if value_head:
        config.tie_word_embeddings = False
    # Each layer looks at its own size of heads.
    kernel = choose_attention(attention, this_site(DTYPES[dtype], head_size=FLASH_MULTIPLE))
    log.info("kernel of=attention chosen=%s reason=%s", kernel.kernel, kernel.reason)
    prepare_heads = partial(add_heads, heads=heads) if heads else None
    with torch.device("meta"):
        transformer = build(config, packed=findings.packed, kernel=kernel.kernel, prepare=prepare_heads, family=rules)
        if value_head:
            give_value_head(transformer.model)
    if recompute:
        transformer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if prepare is not None:
        prepare(transformer.model)
    model = FsdpModel(transformer, findings, place, dtype=DTYPES[dtype], is_critic=value_head)
    shard(model, place, dtype=DTYPES[dtype])
    model.load(model_dir)
    return model


def _num_heads(config: Any, model_dir: Path, findings: Findings, freeze: Sequence[str]) -> int:
    """Return the number of heads for further tokens in the files. Raises ConfigRefused."""
    heads = count_heads(str(config.model_type), model_dir, freeze=freeze)
    if not findings.packed:
        raise ConfigRefused(HEADS_SETTING, f"0 for {config.model_type}, which is computed in padded rows", "> 0")
    return heads


def shard(model: FsdpModel, place: Place, *, dtype: torch.dtype) -> None:
    """Give a model without memory the parts of this rank: layer by layer, so that one whole layer at most is there."""
    options: dict[str, Any] = {"mesh": place.mesh()}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = layers_of(model.transformer)
    for layer in layers:
        layer.to_empty(device=place.device)
        fully_shard(layer, **options)
    inner = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inner:
            module.to_empty(device=place.device, recurse=False)
    model.transformer.tie_weights()  # ``to_empty`` has given the embedding and the output layer a weight each
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the losses have denominators over all ranks: gradients are sums
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def layers_of(transformer: Any) -> list[torch.nn.Module]:
    """Return the layers of a model, each gathered for its own pass: of nested layers the outermost."""
    names = set(transformer._no_split_modules or ())
    layers = [module for module in transformer.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigRefused("model.path", "a model that names its layers", type(transformer).__name__)
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inner]  # falcon_mamba names its mixers, too


def give_value_head(transformer: Any) -> None:
    """Put a value head of zeros in the place of a model's output layer."""
    embedding = transformer.get_input_embeddings().weight
    head = torch.nn.Linear(
        transformer.config.get_text_config().hidden_size, 1, bias=False, device=embedding.device, dtype=embedding.dtype
    )
    torch.nn.init.zeros_(head.weight)
    transformer.set_output_embeddings(head)
