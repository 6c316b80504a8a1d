"""A model of the library transformers as one set of weights: its module, and views of its tensors under the names of
the model's files, so filling those fills the module. Knows no version.

The module's tensors have other names and shapes than the files, where several of them are one parameter in memory (the
experts of a layer, for example). The library converts them on loading and back on saving. Conversions back that only
cut and turn tensors give views of the parameters; a model that needs another kind is refused.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.logging import disable_progress_bar

from tidemill.actors.errors import UnsupportedModel, UpdateRefused
from tidemill.actors.serving.builtin.shape import ModelFacts, ModelShape
from tidemill.actors.serving.builtin.weights import weight_files
from tidemill.rewards.model_text import EndTokens
from tidemill.weightstore.format.kept_names import kept_names
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.store import snapshot_files


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
        """``kept``: names that are not converted (``kept_names``). Raises UnsupportedModel for a model whose files are
        not made of views of its tensors.
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
    kept = kept_names(tensors, stored, lambda name: revert_weight_conversion(model, {name: tensors[name].to("meta")}))
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
