"""Checks of the model: its directory, sizes against parallelism and context, weights, tokenizer. Loads no torch."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.errors import UnsupportedModel
from actors.serving.builtin.shape import ModelShape
from bus.wire.json_object import JsonObject
from launch.checks.findings import Report
from launch.settings.prepare_config import PrepareConfig
from launch.settings.run_config import ModelConfig, RunConfig
from learner.megatron.arguments import refusals as argument_refusals
from learner.megatron.sizes import FAMILIES, refusals

SETTING = "model.path"
INDEX = "model.safetensors.index.json"
SPLITS = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel")
"""Settings of the learner that divide a model."""
HEADER_MOST = 100_000_000
"""Largest header, in bytes. Source: the safetensors library's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """Facts about the model that the other checks use."""

    directory: Path | None
    """None = ``prepare`` makes it when the run starts."""
    vocab_size: int
    context: int
    """Tokens of prompt and response together that the model takes, or the engine if it takes fewer."""
    num_parameters: int
    """0 = not known."""
    shape: ModelShape
    largest_tensor: int = 0
    """Parameters of the largest tensor."""
    critic: ModelShape | None = None
    """The model in ``learner.critic.path``; None = the critic starts from the policy's model, or there is none."""


def check_model(report: Report, config: RunConfig, *, made: bool) -> CheckedModel | None:
    """Report errors in the model; return its facts, None if other checks are impossible without it. ``made``: ``prepare`` makes it."""
    path = Path(config.model.path)
    prepare = config.prepare if made else None
    where = "prepare" if prepare is not None else f"{path}/config.json"
    values = prepared_values(prepare) if prepare is not None else _read_config(report, config.model)
    if values is None:
        return None
    before = len(report.errors)
    for refused in refusals(values, where=where, **{name: getattr(config.learner, name) for name in SPLITS}):
        named = [f"learner.{name}" for name in SPLITS if f"learner.{name}" in refused.want]
        cure = f"lower {' or '.join(named)}" if named else "use another model"
        report.error("model", refused.field, want=refused.want, got=refused.got, cure=f"{cure} ({report.at(SETTING)})")
    for refused in argument_refusals(config.learner.megatron):
        report.error("model", refused.field, want=refused.want, got=refused.got, cure="see docs/parallelism.md, or remove it")
    shape = _shape(report, values, where)
    if shape is None or len(report.errors) > before:
        return None
    sizes = [math.prod(tensor) for tensor in shape.tensors().values()]
    parameters = sum(sizes)
    model = CheckedModel(
        directory=None if prepare is not None else path,
        vocab_size=shape.vocab_size,
        context=min(shape.max_positions, config.engine.max_context or shape.max_positions),
        num_parameters=parameters,
        shape=shape,
        largest_tensor=max(sizes, default=0),
        critic=_check_critic(report, config, shape),
    )
    if prepare is None:
        _check_weights(report, path, shape)
    _check_context(report, config, model, shape)
    _check_reference(report, config, shape)
    if len(report.errors) == before:
        what = "made at the start" if prepare is not None else str(path)
        report.good(
            "model",
            f"{what}: {shape.family}, {shape.num_layers} layers of {shape.hidden}, {parameters:,} parameters, "
            f"{shape.vocab_size} tokens, context {model.context}",
        )
    return model


def prepared_values(prepare: PrepareConfig) -> dict[str, object]:
    """Return the fields of the config.json that ``prepare`` will write, as far as the checks read them."""
    return {
        "model_type": "qwen3",
        "vocab_size": prepare.vocab_size or {"digits": 16, "gsm8k": 512}[prepare.kind],
        "hidden_size": prepare.hidden,
        "intermediate_size": prepare.intermediate,
        "num_hidden_layers": prepare.layers,
        "num_attention_heads": prepare.heads,
        "num_key_value_heads": prepare.kv_heads,
        "head_dim": prepare.head_dim,
        "max_position_embeddings": prepare.max_position,
        "rope_theta": prepare.rope_theta,
        "tie_word_embeddings": prepare.tie_embeddings,
    }


def _read_config(report: Report, model: ModelConfig) -> JsonObject | None:
    path, want = Path(model.path), "a directory with a Hugging Face model (config.json, *.safetensors, tokenizer.json)"
    if not model.path:
        cure = "set one, or have a small one made: prepare: {kind: digits}"
        report.error("model", report.at(SETTING), want=want, got="none", cure=cure)
        return None
    file = path / "config.json"
    if not file.is_file():
        got = "no such directory" if not path.is_dir() else "a directory without config.json"
        report.error("model", report.at(SETTING), want=want, got=f"{model.path!r}: {got}", cure="give the directory it was saved to")
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        report.error("model", str(file), want="a JSON map", got=str(error), cure=f"save the model again, or fix {report.at(SETTING)}")
        return None
    if not isinstance(values, dict):
        report.error("model", str(file), want="a JSON map", got=type(values).__name__, cure="save the model again")
        return None
    return values


def _shape(report: Report, values: Mapping[str, object], where: str) -> ModelShape | None:
    """Return the sizes; None for a model that the built-in decoder does not support, and that the learner would train differently, too."""
    try:
        return ModelShape.of(values, where=where)
    except UnsupportedModel as error:
        if values.get("model_type") in FAMILIES:  # otherwise it has been reported already
            report.error("model", error.where, want="a model that engine and learner support", got=error.reason, cure="use another model")
    return None


def _check_weights(report: Report, path: Path, shape: ModelShape) -> None:
    """Compare names and shapes in the files' headers with config.json; no weight is read."""
    cure = f"save the model again, or give another one ({report.at(SETTING)})"
    try:
        there = tensors_in(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:  # headers of any content
        report.error("model", str(path), want="its weights in *.safetensors", got=str(error), cure=cure)
        return
    for name, wanted in shape.tensors().items():
        if there.get(name) != wanted:
            got = "none" if name not in there else f"one of {there[name]}"
            report.error("model", str(path), want=f"a tensor {name} of {wanted}, as config.json has it", got=got, cure=cure)
            return


def tensors_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in a model directory, from the headers of its safetensors files. Raises ValueError, OSError."""
    if (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise ValueError("no such file")
    found: dict[str, tuple[int, ...]] = {}
    for name in files:
        found |= _header(path / name)
    return found


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape from one header. Source: huggingface.co/docs/safetensors, "Format": eight bytes of length, then a JSON map."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > HEADER_MOST:
            raise ValueError(f"{file}: no safetensors file")
        header = json.loads(opened.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if file.stat().st_size < 8 + length + end:
        raise ValueError(f"{file}: cut off after {file.stat().st_size} of {8 + length + end} bytes")
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _check_context(report: Report, config: RunConfig, model: CheckedModel, shape: ModelShape) -> None:
    """Compare the lengths of prompts and responses with the contexts of model and engine."""
    new, longest = config.sampling.max_new_tokens, config.data.max_prompt_tokens
    if config.engine.max_context > shape.max_positions:
        want, where = f"<= {shape.max_positions} (max_position_embeddings of the model)", report.at("engine.max_context")
        report.error("context", where, want=want, got=config.engine.max_context, cure="lower it, or 0 for all of it")
    if new >= model.context:
        want = f"< {model.context}, the context of prompt and response together"
        cure = f"set sampling.max_new_tokens to {max(1, model.context // 2)}, say"
        report.error("context", report.at("sampling.max_new_tokens"), want=want, got=new, cure=cure)
    elif longest + new > model.context:
        want = f"<= {model.context - new}: a context of {model.context} less sampling.max_new_tokens = {new}"
        report.error("context", report.at("data.max_prompt_tokens"), want=want, got=longest, cure="lower one of the two")


def _check_reference(report: Report, config: RunConfig, shape: ModelShape) -> None:
    """Check the reference model: its weights replace the policy's for a forward pass, so they must have the same shapes."""
    reference = config.learner.algorithm.kl.reference
    if not reference:
        return
    where, want = report.at("learner.algorithm.kl.reference"), "the directory of a model with the sizes of the trained one"
    try:
        there = ModelShape.read(Path(reference))
    except ValueError as error:
        report.error("model", where, want=want, got=str(error), cure="fix the path, or leave it empty: the model at the start of the run")
        return
    if there.tensors() != shape.tensors():
        got = f"{there.family}, {there.num_layers} layers of {there.hidden} in {reference}"
        report.error("model", where, want=want, got=got, cure="use a reference of the same architecture")


def _check_critic(report: Report, config: RunConfig, shape: ModelShape) -> ModelShape | None:
    """Check the model that the critic starts from, and return its shape: it reads the policy's tokens, in the policy's layout."""
    learner = config.learner
    if not learner.critic.path:
        return None
    path, where = Path(learner.critic.path), report.at("learner.critic.path")
    cure = "fix the path, or leave it empty: the policy's model"
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        there = ModelShape.of(values, where=str(path))
        tensors_in(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        report.error("critic", where, want="the directory of a Hugging Face model", got=str(error), cure=cure)
        return None
    if there.vocab_size < shape.vocab_size or there.max_positions < shape.max_positions:
        want = f"a vocabulary of at least {shape.vocab_size} tokens and a context of at least {shape.max_positions}, the policy's"
        got = f"{there.vocab_size} tokens, context {there.max_positions} in {path}"
        report.error("critic", where, want=want, got=got, cure="use a model with the policy's tokenizer")
        return None
    for refused in refusals(values, where=f"{path}/config.json", **{name: getattr(learner, name) for name in SPLITS}):
        report.error("critic", refused.field, want=refused.want, got=refused.got, cure=f"use another model ({where})")
    return there
