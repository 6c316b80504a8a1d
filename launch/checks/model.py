"""Checks of the model: its directory, sizes against parallelism and context, weights, tokenizer. Loads no torch."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.actors.errors import NotDecoded, UnsupportedModel
from tidemill.actors.serving.builtin.blocks import BLOCK, RowSizes
from tidemill.actors.serving.builtin.row_sizes import read_row_sizes
from tidemill.actors.serving.builtin.shape import FAMILIES as DECODED
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.model_values import EXPERTS, LOCAL_EXPERTS, ROPE, ROPE_KEYS, as_older, language_values
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.launch.checks.backends import check_backend, check_megatrons_critic
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.weights import check_megatron, check_tuning
from tidemill.launch.devices.demand import ModelSize
from tidemill.launch.devices.fsdp_memory import fsdp_rows
from tidemill.launch.devices.memory_table import MemoryRow, dtype_on, engine_rows, memory_rows, state_rows, valued
from tidemill.launch.devices.rank_memory import ITEM_BYTES
from tidemill.launch.devices.shapes import Shapes, trained_tensors
from tidemill.launch.settings.run_config import ModelConfig, RunConfig
from tidemill.launch.settings.run_paths import REAL_MODEL
from tidemill.learner.backends.choice import BackendChoice, choose_backend
from tidemill.learner.layout.model_files import tensors_in, text_tensors_in, trained_heads_in
from tidemill.learner.layout.sizes import FAMILIES
from tidemill.learner.settings.backends import FSDP, MEGATRON
from tidemill.learner.settings.config import ROLLOUT

SETTING = "model.path"
# Sizes that the checks use for every family.
NEEDED = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size")
# Errors of files of any content.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """Facts about the model that the other checks use."""

    directory: Path | None  # None = `prepare` makes it when the run starts
    vocab_size: int
    context: int  # Tokens of prompt and response together that the model takes, or the engine if it takes fewer
    num_parameters: int  # 0 = not known
    shape: ModelShape | None  # None for a family that the built-in engine's decoder lacks
    tensors: Shapes = field(default_factory=dict, repr=False)  # Shapes of the weights by name
    # The model in `learner.critic.path`; None = none, or of a family that the built-in engine lacks.
    critic: ModelShape | None = None
    backend: str = MEGATRON  # The one that trains it
    routed_bytes: int = 0  # Bytes of the experts of one token in a sample, where they are replayed; else 0
    num_trained: int | None = None  # Parameters that the learner trains; None = all
    # Sizes of an engine's rows by its dtype, for a model without ``shape`` that transformers runs in the engine.
    row_sizes: Mapping[str, RowSizes] = field(default_factory=dict)

    @property
    def critic_tensors(self) -> Shapes | None:
        """Shapes of a critic's weights; None = not known."""
        shape = self.critic or self.shape
        return None if shape is None else valued(shape).tensors()

    def sizes_of_rows(self, dtype: str) -> RowSizes | None:
        """Return the sizes of the rows of a built-in engine with this dtype; None = SGLang serves the model."""
        return self.row_sizes.get(dtype) if self.shape is None else RowSizes.of(self.shape, ITEM_BYTES[dtype])


def rank_rows(model: CheckedModel, config: RunConfig, *, cuda: bool, engine_memory: int = 0) -> tuple[MemoryRow, ...]:
    """Return the table of memory; for a family that the decoder lacks without activations and logits.
    ``engine_memory``: as for ``memory_rows``. Raises UnsupportedModel for more rows than there is memory for.
    """
    if model.backend == MEGATRON and model.shape is not None:
        return memory_rows(model.shape, config, cuda=cuda, critic=model.critic, engine_memory=engine_memory)
    rows_of = state_rows if model.backend == MEGATRON else fsdp_rows
    rows = rows_of(model.tensors, config, cuda=cuda, critic=model.critic_tensors)
    sizes = model.sizes_of_rows(dtype_on(config.engine.dtype, cuda=cuda))
    if sizes is None:
        return rows
    return *rows, *engine_rows(model.num_parameters, sizes, config, cuda=cuda, memory_bytes=engine_memory)


def check_model(report: Report, config: RunConfig, *, prepared: bool) -> CheckedModel | None:
    """Report errors in the model; return its facts, None after an error. ``prepared``: ``prepare`` makes it."""
    path = Path(config.model.path)
    prepare = config.prepare if prepared else None
    where = "prepare" if prepare is not None else f"{path}/config.json"
    values = {"model_type": "qwen3", **prepare.values} if prepare is not None else _read_config(report, config.model)
    if values is None:
        return None
    before = len(report.errors)
    backend = _backend(config, values)
    check_backend(report, config, values, where, backend.kind)
    shape = _shape(report, config, values, where, backend.kind)
    _check_runner(report, config, shape)
    row_sizes = _row_sizes(report, config, path) if shape is None and len(report.errors) == before else {}
    in_files = _tensors(report, path) if prepare is None and len(report.errors) == before else {}
    of_text = language_values(values)
    if shape is None and len(report.errors) == before:
        _require_sizes(report, of_text, where)
    routed_bytes = _routed_bytes(report, config, of_text) if len(report.errors) == before else 0
    if len(report.errors) > before:
        return None
    tensors = shape.tensors() if shape is not None else in_files
    vocabulary, positions = (of_text.get(name) for name in NEEDED[:2])
    if shape is not None:
        vocabulary, positions = shape.vocab_size, shape.max_positions
    assert isinstance(vocabulary, int) and isinstance(positions, int)
    positions = min([positions, *(sizes.max_positions for sizes in row_sizes.values())])
    model = CheckedModel(
        directory=None if prepare is not None else path,
        vocab_size=vocabulary,
        context=_context(config, positions),
        num_parameters=sum(map(math.prod, tensors.values())),
        shape=shape,
        tensors=tensors,
        critic=_check_critic(report, config, vocabulary, positions, backend.kind),
        backend=backend.kind,
        routed_bytes=routed_bytes,
        num_trained=sum(map(math.prod, trained_tensors(tensors, config.learner, backend=backend.kind).values())),
        row_sizes=row_sizes,
    )
    if prepare is None:
        _check_weights(report, path, tensors, in_files)
    _check_context(report, config, model, positions)
    _check_reference(report, config, values, model)
    check_tuning(report, config, tensors, backend=backend.kind)
    check_megatron(report, config, tensors, num_layers=int(str(of_text["num_hidden_layers"])))
    if len(report.errors) == before:
        text = f"{_in_words(of_text, model)}, trained by {backend.kind} ({backend.reason})"
        report.good("model", f"{path if prepare is None else 'made at the start'}: {text}")
    return model


def _context(config: RunConfig, positions: int) -> int:
    """Return the tokens of the longest sequence that an engine takes."""
    longest, room = config.engine.context_bounds
    if room and config.engine.kind == "builtin":
        room = max(BLOCK, room // BLOCK * BLOCK)  # its memory has whole blocks
    return min([positions, *filter(None, (longest, room))])


def _require_sizes(report: Report, values: Mapping[str, object], where: str) -> None:
    for name in (name for name in NEEDED if not isinstance(values.get(name), int)):
        report.error("model", f"{where}: {name}", want="a number", got=values.get(name), cure="save the model again")


def _backend(config: RunConfig, values: JsonMapping) -> BackendChoice:
    return choose_backend(config.learner, values, megatron_checkpoint=bool(config.model.megatron_checkpoint))


def _in_words(values: Mapping[str, object], model: CheckedModel) -> str:
    layers = f"{values['num_hidden_layers']} layers of {values['hidden_size']}"
    sizes = f"{model.num_parameters:,} parameters, {model.vocab_size} tokens, context {model.context}"
    return f"{values['model_type']}, {layers}, {sizes}"


def _routed_bytes(report: Report, config: RunConfig, values: Mapping[str, object]) -> int:
    """Return the bytes of a token's experts in a sample; refuse a model whose layers with experts are not known."""
    if config.learner.routing_replay != ROLLOUT:
        return 0
    if (routed := RoutedShape.of(values)) is not None:
        return routed.bytes_per_token
    if any(values.get(key) for key in (EXPERTS, LOCAL_EXPERTS, "n_routed_experts")):
        want = f"old or none: the layers with experts are not known for {values.get('model_type')} (docs/models.md)"
        cure = "use learner.routing_replay: old, with which the learner records its own experts"
    else:
        want, cure = "none: the model has no experts", "remove the setting"
    report.error("model", "learner.routing_replay", want=want, got=ROLLOUT, cure=cure)
    return 0


def _read_config(report: Report, model: ModelConfig) -> JsonObject | None:
    path, want = Path(model.path), "a directory with a Hugging Face model (config.json, *.safetensors, tokenizer.json)"
    if not model.path:
        cure = "set one, or have a small one made: prepare: {kind: digits}"
        report.error("model", SETTING, want=want, got="none", cure=cure)
        return None
    file = path / "config.json"
    if not file.is_file():
        got = "no such directory" if not path.is_dir() else "a directory without config.json"
        cure = "give the directory it was saved to, or org/name of the Hugging Face Hub"
        if model.path == REAL_MODEL:
            cure = "have it made (make real, or the commands that tidemill init real prints), or give another"
        report.error("model", SETTING, want=want, got=f"{model.path!r}: {got}", cure=cure)
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cure = f"save the model again, or fix {report.at(SETTING)}"
        report.error("model", str(file), want="a JSON map", got=str(error), cure=cure)
        return None
    if not isinstance(values, dict):
        report.error("model", str(file), want="a JSON map", got=type(values).__name__, cure="save the model again")
        return None
    return values


def _shape(
    report: Report, config: RunConfig, values: Mapping[str, object], where: str, backend: str
) -> ModelShape | None:
    """Return the sizes for the built-in decoder; None for a model that it lacks: an error where it must run it."""
    family = values.get("model_type")
    megatrons = family in FAMILIES or bool(config.learner.bridge)
    is_trainable = megatrons or backend == FSDP  # another one has been reported already
    if not is_trainable or (family not in DECODED and config.engine.kind == "sglang"):
        return None
    try:
        return ModelShape.of(values, where=where)
    except UnsupportedModel as error:
        if isinstance(error, NotDecoded) and config.engine.kind == "builtin" and config.engine.runner != "decoder":
            return None
        cure = "use another model" if family in DECODED else "use engine.kind: sglang, or another model"
        report.error("model", error.where, want="a model that engine and learner support", got=error.reason, cure=cure)
    return None


def _check_runner(report: Report, config: RunConfig, shape: ModelShape | None) -> None:
    """Refuse settings that transformers as the runner of an engine does not have."""
    is_decoded = config.engine.kind != "builtin" or (shape is not None and config.engine.runner != "transformers")
    if config.learner.routing_replay == ROLLOUT and not is_decoded:
        want = "none where transformers runs the model in the engine, which reports no experts then"
        cure = "remove it, or use engine.kind: sglang"
        report.error("model", "learner.routing_replay", want=want, got=ROLLOUT, cure=cure)


def _row_sizes(report: Report, config: RunConfig, path: Path) -> Mapping[str, RowSizes]:
    """Return the sizes of an engine's rows by dtype, for a model that transformers runs; else none."""
    if config.engine.kind != "builtin":
        return {}
    try:
        return read_row_sizes(path, config.learner.family)
    except UnsupportedModel as error:
        cure = "use engine.kind: sglang, or another model"
        report.error("model", error.where, want="a model that the engine can run", got=error.reason, cure=cure)
    return {}


Tensors = Mapping[str, tuple[int, ...]]  # Shapes by name


def _tensors(report: Report, path: Path) -> Tensors:
    """Return the shapes in the headers of the files; no weight is read."""
    try:
        return tensors_in(path)
    except UNREADABLE as error:
        cure = f"save the model again, or give another one ({report.at(SETTING)})"
        report.error("model", str(path), want="its weights in *.safetensors", got=str(error), cure=cure)
        return {}


def _check_weights(report: Report, path: Path, of_config: Tensors, in_files: Tensors) -> None:
    for name, shape in of_config.items():
        if in_files.get(name) != shape:
            got = "none" if name not in in_files else f"one of {in_files[name]}"
            cure = f"save the model again, or give another one ({report.at(SETTING)})"
            want = f"a tensor {name} of {shape}, as config.json has it"
            report.error("model", str(path), want=want, got=got, cure=cure)
            return


def size_here(config: RunConfig, model: Path | None = None) -> ModelSize:
    """Return the sizes of the run's model (in ``model``), if it is on this machine; else an empty size."""
    path = model or Path(config.model.path)
    if model is None and not config.model.path:
        return ModelSize()
    try:
        critic = _critic_tensors(Path(config.learner.critic.path or path))
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = text_tensors_in(path)
        if config.learner.mtp_loss_scaling_factor:
            tensors |= trained_heads_in(path)
        return ModelSize(tensors, critic, _backend(config, values).kind)
    except UNREADABLE:
        return ModelSize()


def _critic_tensors(path: Path) -> Tensors | None:
    try:
        return valued(ModelShape.read(path)).tensors()
    except (UnsupportedModel, *UNREADABLE):
        return None


def _check_context(report: Report, config: RunConfig, model: CheckedModel, positions: int) -> None:
    """Compare lengths of prompts and responses with the contexts, and stop tokens with the vocabulary."""
    _check_stops(report, config, model.vocab_size)
    new, longest = config.sampling.max_new_tokens, config.data.max_prompt_tokens
    if config.engine.max_context > positions:
        want, where = f"<= {positions} (the longest context of the model)", "engine.max_context"
        report.error("context", where, want=want, got=config.engine.max_context, cure="lower it, or 0 for all of it")
    if new >= model.context:
        want = f"< {model.context}, the context of prompt and response together"
        cure = f"set sampling.max_new_tokens to {max(1, model.context // 2)}, say"
        report.error("context", "sampling.max_new_tokens", want=want, got=new, cure=cure)
    elif longest + new > model.context:
        want = f"<= {model.context - new}: a context of {model.context} less sampling.max_new_tokens = {new}"
        cure = "lower one of the two"
        report.error("context", "data.max_prompt_tokens", want=want, got=longest, cure=cure)


def _check_stops(report: Report, config: RunConfig, vocab_size: int) -> None:
    sections = {"sampling": config.sampling} | {f"eval.sets.{name}": own for name, own in config.eval.sets.items()}
    for name, section in sections.items():
        if outside := [token for token in section.stop_token_ids or () if token >= vocab_size]:
            want = f"ids below {vocab_size}, the size of the model's vocabulary"
            cure = "ids of tokens are in the model's tokenizer.json"
            report.error("model", f"{name}.stop_token_ids", want=want, got=outside[0], cure=cure)


def _check_reference(report: Report, config: RunConfig, values: JsonMapping, model: CheckedModel) -> None:
    """Check the reference model: its weights replace the policy's for a forward pass, so shapes must be equal."""
    reference = config.learner.algorithm.kl.reference
    if not reference:
        return
    where = "learner.algorithm.kl.reference"
    want = "the directory of a model with the sizes of the trained one"
    try:
        its = json.loads((Path(reference) / "config.json").read_text(encoding="utf-8"))
        family = its["model_type"]
        is_decoded = model.shape is not None
        tensors = ModelShape.of(its, where=reference).tensors() if is_decoded else text_tensors_in(Path(reference))
        # A reference needs no heads for further tokens, which only the policy's own loss reads.
        own_tensors = dict(model.tensors) if is_decoded or not model.directory else text_tensors_in(model.directory)
        # Other families may have rotary positions by kind of layer, which version 4 has no keys for.
        configs = (as_older(values), as_older(its)) if is_decoded else (language_values(values), language_values(its))
    except UNREADABLE as error:
        cure = "fix the path, or leave it empty: the model at the start of the run"
        report.error("model", where, want=want, got=str(error), cure=cure)
        return
    cure = "use a reference of the same architecture"
    if (family, tensors) != (values["model_type"], own_tensors):
        got = f"{family}, {its.get('num_hidden_layers')} layers of {its.get('hidden_size')} in {reference}"
        report.error("model", where, want=want, got=got, cure=cure)
    for name in ROPE_KEYS if is_decoded else (ROPE, *ROPE_KEYS):
        ours, theirs = (values_of.get(name) for values_of in configs)
        if ours != theirs and all(name in values_of for values_of in configs):
            want = f"a model with the policy's {name} = {ours}"
            report.error("model", where, want=want, got=f"{theirs} in {reference}", cure=cure)


def _check_critic(
    report: Report, config: RunConfig, vocab_size: int, max_positions: int, backend: str
) -> ModelShape | None:
    """Check the model that the critic starts from, and return its shape: it reads the policy's tokens."""
    learner = config.learner
    if not learner.critic.path:
        return None
    path, where = Path(learner.critic.path), report.at("learner.critic.path")
    cure = "fix the path, or leave it empty: the policy's model"
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        vocabulary, positions = (int(language_values(values)[name]) for name in NEEDED[:2])
        tensors_in(path)
    except UNREADABLE as error:
        report.error("critic", where, want="the directory of a Hugging Face model", got=str(error), cure=cure)
        return None
    if vocabulary < vocab_size or positions < max_positions:
        want = f"a vocabulary of at least {vocab_size} tokens and a context of at least {max_positions}, the policy's"
        got = f"{vocabulary} tokens, context {positions} in {path}"
        report.error("critic", where, want=want, got=got, cure="use a model with the policy's tokenizer")
        return None
    if backend == MEGATRON:
        check_megatrons_critic(report, config, values, where)
    try:
        return ModelShape.of(values, where=str(path))
    except UnsupportedModel:  # no engine will serve it
        return None
