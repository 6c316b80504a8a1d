"""Every causal language model that the library transformers has: its weights, and its runner. Knows no sequence.

The runner has the library's own modules compute over a cache by row (``transformers_cache.py``). Adapters are left to
the decoder: the library's modules have no place for several at once, and another class for each projection of each
family.

The weights are the module, and views of its tensors under the names of the model's files, so filling those fills the
module. Its tensors have other names and shapes than the files where several of them are one parameter in memory (the
experts of a layer, for example). The library converts them on loading and back on saving. Conversions back that only
cut and turn tensors give views of the parameters; a model that needs another kind is refused.

Shape letters: N = running rows, L = positions (padded), U = prompts of a prefill, T = tokens per prompt (padded), R =
rows of a prefill, P = scored places, V = vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from tidemill.actors.errors import UnsupportedModel, UpdateRefused
from tidemill.actors.serving.builtin.blocks import BlockTable
from tidemill.actors.serving.builtin.input_scores import LOGITS_AT_ONCE, InputScores, Scoring, scores_of
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.shape import ModelFacts, ModelShape
from tidemill.actors.serving.builtin.transformers_cache import RowCache, prefill_cache
from tidemill.actors.serving.builtin.weights import weight_files
from tidemill.rewards.model_text import EndTokens
from tidemill.weightstore.format.manifest import Bucket, unconverted_names
from tidemill.weightstore.store import snapshot_files

SELF_TEST_TOKENS = (3, 9)
"""Tokens of the rows of the self-test: with different lengths, so that one is padded."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest mean distance of log-probs in the self-test, in nats: rounding is far below, a wrong position above."""


class TransformersWeights:
    """The tensors of one module (see ``WeightSet``)."""

    adapter_shape: ModelShape | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        unused: Mapping[str, tuple[int, ...]],
        kept: frozenset[str],
        order: Sequence[str] = (),
    ) -> None:
        """``kept``: names that are not converted (``unconverted_names``). Raises UnsupportedModel for a model whose
        files are not made of views of its tensors.
        """
        self.model = model.requires_grad_(False).eval()
        self.dtype, self.device, self.order, self.unused = model.dtype, model.device, tuple(order), unused
        self.kept = kept
        self.named, self.aliases = _named(model, kept)
        self.writes = 0
        self._finalized = -1

    @property
    def final(self) -> bool:
        return self._finalized == self.writes

    def finalize(self) -> None:
        self._finalized = self.writes

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.named.values())

    def with_alias(self) -> dict[str, Tensor]:
        return self.named | {alias: self.named[name] for alias, name in self.aliases.items()}

    def place(self, bucket: Bucket) -> Tensor | None:
        """Return None: the order of the tensors in memory is the module's."""
        return None

    @property
    def empty_copy(self) -> "Callable[[Sequence[str]], TransformersWeights]":
        return partial(_filled_in, _without_weights(self.model), self.device, self.unused, self.kept)


class _Views(TorchFunctionMode):
    """Tensors are not made contiguous, so that parts of a tensor stay views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _named(model: PreTrainedModel, kept: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return views of a module's tensors by the names in files, and the names of tied ones with their targets."""
    tensors, tied = model.state_dict(), model.all_tied_weights_keys or {}
    with _Views():
        named = {name: tensors[name] for name in tensors if name in kept}
        named |= revert_weight_conversion(
            model, {name: tensors[name] for name in tensors if name not in tied and name not in kept}
        )
        aliases = {
            alias: target
            for key, origin in tied.items()
            for (alias, _), (target, _) in zip(
                revert_weight_conversion(model, {key: tensors[key]}).items(),
                revert_weight_conversion(model, {origin: tensors[origin]}).items(),
                strict=True,
            )
        }
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    for name, tensor in named.items():
        if tensor.untyped_storage().data_ptr() not in memory:
            raise UnsupportedModel(
                f"model_type {model.config.model_type}",
                f"want tensors of files that are parts of the module's tensors, got {name}, which is computed",
            )
    return named, aliases


def _without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a module whose parameters are on ``meta``, and so have no memory; its buffers are copied."""
    on_meta = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, on_meta)


def _filled_in(
    skeleton: PreTrainedModel,
    device: torch.device,
    unused: Mapping[str, tuple[int, ...]],
    kept: frozenset[str],
    order: Sequence[str],
) -> TransformersWeights:
    parameters = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        for parameter in skeleton.parameters()
    }
    return TransformersWeights(copy.deepcopy(skeleton, parameters), unused=unused, kept=kept, order=order)


def model_options(model_dir: Path) -> tuple[PreTrainedConfig, dict[str, str]]:
    """Return the configuration in a model directory, and the options to make its model with. Raises
    UnsupportedModel.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(str(model_dir / "config.json"), f"transformers cannot read it: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        want = "want a model that transformers has as a causal language model"
        raise UnsupportedModel(f"{model_dir / 'config.json'}: model_type", f"{want}, got {config.model_type!r}")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(f"{model_dir / 'config.json'}: quantization_config", "want unquantised weights")
    # Caps of attention scores are in the plain implementation alone.
    has_caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return config, {"attn_implementation": "eager"} if has_caps else {}


def facts_of(model: PreTrainedModel, model_dir: Path) -> ModelFacts:
    """Return the facts about a loaded model. Raises UnsupportedModel for one without a longest context."""
    text = model.config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        raise UnsupportedModel(f"{model_dir / 'config.json'}: max_position_embeddings", "want a number, got none")
    return ModelFacts(
        family=model.config.model_type,
        architecture=type(model).__name__,
        vocab_size=text.vocab_size,
        max_positions=min([positions, *_same_angles(text)]),
        eos_ids=EndTokens.read(model_dir).ids,
    )


def _same_angles(text: PreTrainedConfig) -> list[int]:
    """Return the limits of positions whose angles do not depend on the lengths of rows: with longrope the longest row
    of a pass chooses the angles of all others.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    return [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]


def load_transformers_model(model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> TransformersWeights:
    """Load the causal language model in a directory. A snapshot is verified byte by byte (SnapshotBroken). Raises
    UnsupportedModel, UpdateRefused for missing tensors.
    """
    _, options = model_options(model_dir)
    if (model_dir / snapshot_files.MANIFEST).exists():
        snapshot_files.verify(model_dir)
    disable_progress_bar()  # a log has lines
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(str(model_dir), f"transformers cannot load it: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise UpdateRefused(f"{model_dir}: {len(missing)} tensors are missing, among them {missing[0]}")
    tensors, stored = model.state_dict(), dict(_shapes(model_dir))
    kept = unconverted_names(
        tensors, stored, lambda name: revert_weight_conversion(model, {name: tensors[name].to("meta")})
    )
    weights = TransformersWeights(model.to(device), unused={}, kept=kept)
    known = weights.with_alias()
    weights.unused = {name: shape for name, shape in stored.items() if name not in known}
    weights.finalize()
    return weights


def _shapes(model_dir: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in weight_files(model_dir):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tuple(tensors.get_slice(name).get_shape())


class TransformersRunner:
    """One model with a cache by row (see ``ModelRunner``)."""

    def __init__(self, weights: TransformersWeights, probed: DynamicCache, *, num_blocks: int) -> None:
        """``probed``: as ``transformers_cache.probe`` returns it."""
        self.weights: TransformersWeights | None = weights
        self.device = weights.device
        self.adapters: dict[str, Adapter] = {}
        self.captures = False
        self.experts_BTGJ: NDArray[np.int64] | None = None
        self.memory = RowCache(probed, num_blocks=num_blocks)
        self.finds_prefixes = not self.memory.has_states  # a state at the end of a block is not kept
        self._config = weights.model.config.get_text_config(decoder=True)

    def prefill(
        self,
        contexts: Sequence[NDArray[np.int32]],
        cached: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        adapter_names: Sequence[str],
    ) -> tuple[Tensor, int]:
        assert not any(adapter_names), "they are merged into the weights"
        scores_U: dict[int, Tensor] = {}
        num_padded = 0
        for prompts in self._together(contexts, cached):
            num_cached, cache = cached[prompts[0]], prefill_cache(self._config)
            rows = [row for row, prompt in enumerate(prompt_of_R) if prompt in prompts]
            of_rows = [prompts.index(prompt_of_R[row]) for row in rows]
            self.memory.load(cache, num_cached, [tables[prompt_of_R.index(prompt)] for prompt in prompts])
            new = [contexts[prompt][num_cached:] for prompt in prompts]
            scores_UV = self._prefill(new, cache)
            scores_U |= dict(zip(prompts, scores_UV, strict=True))
            lengths = [len(contexts[prompt]) for prompt in prompts]
            self.memory.store(cache, lengths, [tables[row] for row in rows], of_rows, num_cached=num_cached)
            num_padded += len(prompts) * max(map(len, new))
        return torch.stack([scores_U[prompt] for prompt in prompt_of_R]), num_padded

    def _together(self, contexts: Sequence[NDArray[np.int32]], cached: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of contexts that are computed together: with as many cached tokens, and of one length where
        padding would reach states.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for number, context in enumerate(contexts):
            key = cached[number], len(context) if self.memory.has_states else 0
            groups.setdefault(key, []).append(number)
        yield from groups.values()

    def _prefill(self, contexts: Sequence[NDArray[np.int32]], cache: DynamicCache) -> Tensor:
        """Add contexts to the cache, padded on the right. Returns the scores of their next tokens, [U, V]."""
        assert self.weights is not None
        lengths = [len(context) for context in contexts]
        ends = sorted(set(lengths))
        kept = torch.tensor([end - 1 for end in ends], device=self.device)
        out = self.weights.model(input_ids=self._padded(contexts), cache=cache, use_cache=True, logits_to_keep=kept)
        columns_U = torch.tensor([ends.index(length) for length in lengths], device=self.device)
        return out.logits[torch.arange(len(contexts), device=self.device), columns_U].float()

    def _padded(self, contexts: Sequence[NDArray[np.int32]]) -> Tensor:
        tokens_UT = np.zeros((len(contexts), max(map(len, contexts))), np.int64)
        for row, context in enumerate(contexts):
            tokens_UT[row, : len(context)] = context
        return torch.from_numpy(tokens_UT).to(self.device)

    def set_rows(self, tables: Sequence[BlockTable], adapter_names: Sequence[str]) -> None:
        self.memory.set_rows(tables)

    def decode(self, last_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        assert self.weights is not None
        mask_NL = self.memory.begin_step(positions_N)
        out = self.weights.model(
            input_ids=torch.from_numpy(last_N).to(self.device)[:, None],
            position_ids=torch.from_numpy(positions_N).to(self.device)[:, None],
            attention_mask=mask_NL,
            cache=self.memory,
            use_cache=True,
        )
        scores_NV: Tensor = out.logits[:, -1].float()
        return scores_NV

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        """Compute the log-probs of given tokens. The scores of all tokens of a sequence are in memory at once."""
        return [result for part in self._divided(batch) for result in self._scores(part, version)]

    def _divided(self, batch: list[Scoring]) -> Iterator[list[Scoring]]:
        """Yield the sequences together if all of their scores fit ``LOGITS_AT_ONCE``, else one after the other."""
        longest = max(len(scoring.tokens) for scoring in batch)
        if len(batch) * longest * self._config.vocab_size <= LOGITS_AT_ONCE:
            yield batch
        else:
            yield from ([scoring] for scoring in batch)

    def _scores(self, batch: list[Scoring], version: int) -> Iterator[InputScores]:
        assert self.weights is not None
        first = min(scoring.start for scoring in batch)
        tokens_UT = self._padded([scoring.tokens for scoring in batch])
        kept = torch.arange(first, tokens_UT.shape[1], device=self.device)
        logits_UPV = self.weights.model(input_ids=tokens_UT, use_cache=False, logits_to_keep=kept).logits
        for scoring, logits_PV in zip(batch, logits_UPV, strict=True):
            of_places_PV = logits_PV[scoring.start - first : len(scoring.tokens) - 1 - first].float()
            yield scores_of(scoring, of_places_PV.__getitem__, self._config.vocab_size, version=version)

    def clear(self, *, free: bool) -> None:
        self.memory.set_rows([])
        if free:
            self.memory.free_memory()
        else:
            self.memory.reset_memory()

    @torch.inference_mode()
    def self_test(self) -> float:
        """Decode two rows of different lengths as the engine does, and compare with plain forward passes. Returns the
        largest mean distance of a row's log-probs (nats). Raises UnsupportedModel for a larger one than ``LIMITS``.
        """
        contexts = [np.arange(length, dtype=np.int32) % self._config.vocab_size for length in SELF_TEST_TOKENS]
        tables = [BlockTable([row], 0, 0) for row in range(min(len(contexts), self.memory.num_blocks))]
        contexts = contexts[: len(tables)]
        numbers = range(len(tables))
        self.prefill([context[:-1] for context in contexts], [0] * len(tables), tables, numbers, [""] * len(tables))
        self.set_rows(tables, [])
        last_N = np.array([context[-1] for context in contexts], np.int64)
        decoded_NV = self.decode(last_N, np.array([len(context) - 1 for context in contexts])).log_softmax(-1)
        distance = 0.0
        for context, decoded_V in zip(contexts, decoded_NV, strict=True):
            assert self.weights is not None
            out = self.weights.model(input_ids=self._padded([context]), use_cache=False)
            plain_V = out.logits[0, -1].float().log_softmax(-1)
            distance = max(distance, float((plain_V.exp() * (plain_V - decoded_V).abs()).sum()))
        self.clear(free=False)
        limit = LIMITS[self.weights.dtype] if self.weights is not None else 0.0
        if not distance <= limit:
            want = f"want decoded rows whose log-probs differ by at most {limit} nats from a forward pass"
            raise UnsupportedModel(f"model_type {self._config.model_type}", f"{want}, got {distance}")
        return distance
