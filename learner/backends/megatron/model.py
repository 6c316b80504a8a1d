"""The policy: Megatron's GPTModel from a Hugging Face directory, in one or several chunks, for data parallelism."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from tidemill.bus.system.functions import described
from tidemill.learner.backends.megatron.bridges import open_bridge
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.layers.dense import ValueHead, is_embedding_too, output_weight
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.layers.lora import MegatronAdapters
from tidemill.learner.backends.megatron.optimizer_pieces import buffers_of
from tidemill.learner.backends.megatron.routing import MegatronRouting
from tidemill.learner.backends.megatron.schedule import Schedule
from tidemill.learner.backends.megatron.weights import Tuning, load_initial, tune
from tidemill.learner.errors import ConfigRefused, LearnerError
from tidemill.learner.kernels.choices import SDPA
from tidemill.learner.layout.parallel import Parallel, of_all_stages
from tidemill.learner.layout.sizes import Dealt
from tidemill.learner.trainer.exports import digest_of, digest_of_kept
from tidemill.learner.trainer.memory import Memory
from tidemill.learner.trainer.port import DTYPES, Finish, Head, Input, ModelInput, Result

ROUTER_BIAS = "router.expert_bias"  # end of the name of a router's bias, which Megatron keeps as a buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPolicy:
    """The model's chunks on this rank, their data-parallel wrappers, and the bridge to their Hugging Face names."""

    chunks: tuple[GPTModel, ...]
    """In the order of the layers: the first of all has the embedding, the last of all the output layer."""
    ddps: tuple[DistributedDataParallel, ...]
    """The wrappers that the schedule and the optimizer use, one for each chunk."""
    bridge: Any
    parallel: Parallel
    replicas: Replicas = field(default_factory=Replicas)
    memory: Memory = field(default_factory=Memory)
    """Memory of the weights, their gradients and the optimizer's state."""
    mixture: Mixture = field(default_factory=Mixture)
    routing: MegatronRouting = field(default_factory=MegatronRouting)
    """The experts of the tokens, to be recorded and replayed."""
    adapters: MegatronAdapters | None = None
    """The only parameters that are trained; None = those of the model itself."""
    model_dir: Path
    """Directory of the model's files."""
    megatron_checkpoint: Path | None = None
    """Checkpoint of Megatron's own training with the initial weights; None = those of ``model_dir``."""
    kept: str = ""
    """Digest of the tensors of the files that are not trained; empty = none."""

    @property
    def module(self) -> GPTModel:
        """The only chunk of this rank."""
        [module] = self.chunks
        return module

    @property
    def ddp(self) -> DistributedDataParallel:
        """The wrapper of the only chunk."""
        [ddp] = self.ddps
        return ddp

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and router biases under Megatron's names, with the chunk's number if several."""
        for number, chunk in enumerate(self.chunks):
            for name, weight in (*chunk.named_parameters(), *_router_biases(chunk)):
                yield f"{number}.{name}" if len(self.chunks) > 1 else name, weight

    def weights_changed(self) -> None:
        """Do nothing: passes read the tensors themselves."""

    @property
    def names_of_heads(self) -> frozenset[str]:
        """None: heads for further tokens are not built."""
        return frozenset()

    def load_reference(self, directory: Path) -> None:
        """Load the weights of another model directory of the same shape. Raises ConfigRefused."""
        with megatron_device(), torch.no_grad():
            self.bridge.load(self.chunks, directory)

    def load_initial(self) -> None:
        """Load the weights again that a new run begins with."""
        with megatron_device(), torch.no_grad():
            load_initial(self.bridge, self.chunks, self.model_dir, self.megatron_checkpoint)

    def ready(self) -> AbstractContextManager[None]:
        """Return the context in which Megatron finds its device."""
        return megatron_device()

    def run(
        self, rows: Sequence[Input], finish: Finish[Input, Result], *, forward_only: bool = False
    ) -> list[Result] | None:
        """Run every row through the model by Megatron's schedules."""
        schedule = Schedule(
            ddps=self.ddps, config=self.config, parallel=self.parallel, mixture=self.mixture, routing=self.routing
        )
        return schedule.run(rows, finish, forward_only=forward_only)

    def head(self) -> Head:
        """Return the output layer of the last chunk. With overlap, Megatron's hook wants a gradient of its weight."""
        last = self.chunks[-1]
        return Head(
            weight_VH=output_weight(last),
            group=self.parallel.tp_group,
            fused=self.bridge.kernels.fused_log_probs,
            placeholder=self.replicas.overlap_grad_reduce and not is_embedding_too(last),
        )

    def further_log_probs(
        self, row: ModelInput, hidden_TH: Tensor, predicts: Callable[[int], Tensor]
    ) -> Iterator[Tensor]:
        """Yield nothing: heads for further tokens are not built."""
        yield from ()

    def moving_biases(self) -> list[Tensor]:
        """Return the biases of this rank's routers, if they move."""
        if not self.mixture.bias_update_rate:
            return []
        return [bias for chunk in self.chunks for _, bias in _router_biases(chunk)]

    @property
    def modules(self) -> tuple[GPTModel, ...]:
        """The chunks."""
        return self.chunks

    @property
    def in_place(self) -> bool:
        """True on a device, where release, resume and gradient buffers know a parameter by its address."""
        return self.parallel.device.type == "cuda"

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary in the model's configuration."""
        return int(self.bridge.hf_config.vocab_size)

    @property
    def counts_tokens(self) -> bool:
        """True if a balancing loss or moving biases count the tokens of each expert."""
        return self.mixture.counts_tokens

    @property
    def obstacle(self) -> str:
        if self.parallel.cp_size > 1:
            return "context parallelism divides the tokens of a row over ranks"
        if self.bridge.kernels.attention != SDPA:
            return f"attention {self.bridge.kernels.attention} takes whole sequences"
        if self.mixture.counts_tokens or self.mixture.replay:
            return "the experts of each copy of a token are counted or replayed"
        return ""

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return self.bridge.config

    @property
    def dtype(self) -> str:
        """The key of ``DTYPES`` for weights and activations."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.config.params_dtype)

    @property
    def begins_apart(self) -> bool:
        return self.megatron_checkpoint is not None or (self.adapters is not None and self.adapters.loaded)

    def gather(self) -> None:
        """Gather the weights that a step left to the next forward pass, before export and copies. Collective."""
        for ddp in self.ddps if self.replicas.overlap_param_gather else ():
            groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
            if any(group.param_gather_handle or not group.param_gather_dispatched for group in groups):
                ddp.start_param_sync(force_sync=True)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights under Hugging Face names, in a fixed order; collective over the ranks of one copy of
        the model.

        Adapters are merged into them. Other weights of this stage that are not split over ranks are views on the live
        ones.
        Raises MemoryReleased.
        """
        yield from of_all_stages(self.export_stage(), self.parallel)

    def export_stage(self, *, without_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of this stage as ``export`` does; collective over the tensor-parallel ranks alone.
        ``without_adapters``: the frozen weights, to which the adapters are not added.
        """
        self.memory.want("the export of weights")
        exported = self.bridge.export(self.chunks)
        yield from exported if self.adapters is None or without_adapters else self.adapters.merged(exported)

    def export_part(self, senders: int, *, without_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of this stage that this rank sends, as ``export_stage``. ``senders``: ranks of the stage
        among which its layers are dealt out, of those that have parts of them. All of these run the iterator to its
        end; any other rank gets nothing. ``without_adapters``: the frozen weights.
        """
        ranks, dealt = self.parallel, Dealt(senders)
        for name, tensor in self.export_stage(without_adapters=without_adapters) if ranks.exports else ():
            if dealt.sender(name) == ranks.export_place:
                yield name, tensor

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices of all adapters under PEFT's names; collective as ``export``."""
        assert self.adapters is not None, "there are no adapters"
        yield from of_all_stages(self.adapters.export(), self.parallel)

    def help_export_adapters(self) -> None:
        if self.adapters is None or not self.parallel.exports:
            return
        # The stages broadcast among the ranks that have the whole matrices, one of each tensor-parallel group.
        for _ in self.export_adapters() if self.parallel.tp_rank == 0 else self.adapters.export():
            pass

    def digest(self) -> str:
        """Return SHA-256 over the names and the SHA-256 of each exported tensor. Collective as ``export``.

        It does not depend on how they are split, and no tensor is kept for it.
        """
        return digest_of(self.export())


def build_policy(
    model_dir: Path,
    *,
    dtype: str,
    parallel: Parallel,
    kernels: Wanted | None = None,
    replicas: Replicas | None = None,
    memory: Memory | None = None,
    mixture: Mixture | None = None,
    tuning: Tuning | None = None,
    value_head: bool = False,
    bridge_class: str = "",
    megatron_checkpoint: Path | None = None,
) -> MegatronPolicy:
    """Build the model on this rank, in ``memory``, with the directory's weights.

    ``megatron_checkpoint``: Megatron's own, with the weights; loading it is collective. ``value_head``: for a critic.
    ``bridge_class``: import path; empty = by model type. Raises ConfigRefused.
    """
    memory, mixture, replicas = memory or Memory(), mixture or Mixture(), replicas or Replicas()
    with megatron_device():
        with _refusals_of_megatron():
            bridge = open_bridge(
                model_dir, dtype=DTYPES[dtype], parallel=parallel, wanted=kernels, mixture=mixture, own=bridge_class
            )
        with memory.region():
            with _refusals_of_megatron():
                chunks = tuple(_chunk(bridge, parallel, number) for number in range(parallel.vp_size))
            with torch.no_grad():
                load_initial(bridge, chunks, model_dir, megatron_checkpoint)
            if value_head:
                _give_value_head(chunks, bridge.config, parallel)
            adapters = tune(chunks, bridge, parallel, tuning or Tuning())
            inner = [_in_float16(bridge.config, chunk) for chunk in chunks]
        ddps = tuple(_data_parallel(bridge.config, part, replicas, memory, is_first=part is inner[0]) for part in inner)
    return MegatronPolicy(
        chunks=chunks,
        ddps=ddps,
        bridge=bridge,
        parallel=parallel,
        replicas=replicas,
        memory=memory,
        mixture=mixture,
        routing=MegatronRouting(chunks, given=mixture.given),
        adapters=adapters,
        model_dir=model_dir,
        megatron_checkpoint=megatron_checkpoint,
        kept="" if value_head else digest_of_kept(model_dir, parallel.device),
    )


@contextmanager
def _refusals_of_megatron() -> Iterator[None]:
    """Raise ConfigRefused, which ends the run, where Megatron's own checks refuse: no restart cures that."""
    try:
        yield
    except LearnerError:
        raise
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigRefused(
            "learner, model.path", "a model and settings that Megatron takes", described(error)
        ) from error


def _chunk(bridge: Any, parallel: Parallel, number: int) -> GPTModel:
    stage = number if parallel.vp_size > 1 else None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    chunk: GPTModel = bridge.build(pre_process=first, post_process=last, vp_stage=stage)
    for parameter in chunk.parameters():
        # Only split parameters have the attributes by which Megatron's optimizer finds the parameters that several
        # ranks share.
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk.to(parallel.device)


def _give_value_head(chunks: tuple[GPTModel, ...], config: Any, parallel: Parallel) -> None:
    """Put a value head in the place of the output layer. Tied weights are the embedding's alone then."""
    for chunk in chunks:
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            chunk.output_layer = ValueHead(config, device=parallel.device)


def _data_parallel(
    config: Any, inner: torch.nn.Module, replicas: Replicas, memory: Memory, *, is_first: bool
) -> DistributedDataParallel:
    # Gradients are scratch memory, because each minibatch sets them to zero first.
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,  # gradients of many micro-batches and ranks are added up, each far below the sum
        overlap_grad_reduce=replicas.overlap_grad_reduce,
        use_distributed_optimizer=replicas.distributed_optimizer,
        overlap_param_gather=replicas.overlap_param_gather,
        bucket_size=replicas.bucket_elements,
    )
    if not replicas.distributed_optimizer:
        with memory.region(scratch=True):
            return DistributedDataParallel(config, settings, inner, disable_bucketing=not is_first)
    # Here the wrapper also moves the weights into a buffer of its own, which has to survive a release.
    with memory.region():
        ddp = DistributedDataParallel(config, settings, inner, disable_bucketing=not is_first)
        sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in buffers_of(ddp)]
        for buffer in buffers_of(ddp):
            buffer.grad_data.untyped_storage().resize_(0)
    with memory.region(scratch=True):
        for buffer, size in zip(buffers_of(ddp), sizes, strict=True):
            buffer.grad_data.untyped_storage().resize_(size)  # every view of it follows
            buffer.reset()
    return ddp


def _router_biases(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers() if name.endswith(ROUTER_BIAS)]


def _in_float16(config: Any, module: GPTModel) -> torch.nn.Module:
    # The biases of routers stay in float32, as Megatron computes with them.
    if config.params_dtype != torch.bfloat16:
        return module
    biases = {name: buffer.clone() for name, buffer in _router_biases(module)}
    inner: torch.nn.Module = Float16Module(config, module)
    for name, buffer in module.named_buffers():
        if name in biases:
            buffer.data = biases[name]
    return inner
