"""Opening of a model directory: the choice of its runner, its weights, and memory for the tokens of its rows.

The decoder runs its own families, because it is faster (``docs/benchmarks.md``) and takes adapters; a model that it
lacks is run by the library transformers.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import NoDevice, UnsupportedModel
from tidemill.actors.serving.builtin.blocks import RowSizes, budget, host_memory
from tidemill.actors.serving.builtin.decoder_runner import DecoderRunner
from tidemill.actors.serving.builtin.runner import ModelRunner
from tidemill.actors.serving.builtin.shape import ModelFacts, ModelShape, choose_runner
from tidemill.actors.serving.builtin.weight_set import WeightSet
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory
from tidemill.bus.system.functions import find_object

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model that is ready to decode."""

    facts: ModelFacts
    weights: WeightSet
    runner: ModelRunner


def open_model(model_dir: Path, config: EngineConfig) -> OpenedModel:
    """Load a model directory. Raises UnsupportedModel, NoDevice, SnapshotBroken, UpdateRefused for wrong tensors,
    FunctionRefused.
    """
    shape, reason = choose_runner(config.runner, lambda: ModelShape.read(model_dir))
    device = _device(config)
    name = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    if shape is not None:
        opened = _open_decoder(model_dir, config, shape, dtype, device)
    else:
        opened = _open_transformers(model_dir, config, dtype, device)
    runner = "decoder" if shape is not None else "transformers"
    log.info("model opened runner=%s reason=%s model=%s", runner, reason, model_dir)
    return opened


def _device(config: EngineConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise NoDevice("engine.device", "auto or cpu where torch finds no GPU", config.device)
    return torch.device(("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device)


def _num_blocks(sizes: RowSizes, config: EngineConfig, device: torch.device) -> int:
    has_gpu = device.type == "cuda"
    return budget(
        sizes,
        max_running=config.max_running,
        max_context=config.max_context,
        kv_tokens=config.kv_tokens,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if has_gpu else host_memory(),
    )


def _open_decoder(
    model_dir: Path, config: EngineConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> OpenedModel:
    num_blocks = _num_blocks(RowSizes.of(shape, dtype.itemsize), config, device)
    weights = Weights(shape, dtype=dtype, device=device)
    load_from_directory(weights, model_dir)
    runner = DecoderRunner(weights, num_blocks=num_blocks)
    return OpenedModel(facts=shape.facts, weights=weights, runner=runner)


def _open_transformers(model_dir: Path, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> OpenedModel:
    if find_spec("transformers") is None:
        want = "want the library transformers, which runs the families that the decoder lacks, got none of the name"
        raise UnsupportedModel(str(model_dir), f"{want}; install it: pip install 'transformers==5.24.*'")
    # On use: the library takes seconds to import.
    from tidemill.actors.serving.builtin.transformers_cache import probe, row_sizes
    from tidemill.actors.serving.builtin.transformers_runner import TransformersRunner
    from tidemill.actors.serving.builtin.transformers_weights import facts_of, load_transformers_model

    if config.family:
        find_object(config.family, "learner.family")
    weights = load_transformers_model(model_dir, dtype=dtype, device=device)
    facts, probed = facts_of(weights.model, model_dir), probe(weights.model)
    num_blocks = _num_blocks(row_sizes(probed, facts.max_positions), config, device)
    runner = TransformersRunner(weights, probed, num_blocks=num_blocks)
    log.info("self-test passed distance=%.1e nats model_type=%s", runner.self_test(), facts.family)
    return OpenedModel(facts=facts, weights=weights, runner=runner)
