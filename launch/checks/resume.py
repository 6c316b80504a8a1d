"""Compares a resumed run with the run that began in its directory: model, prompts, sampling. Reads no bus."""

import hashlib
import json
import logging
from pathlib import Path

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.launch.checks.findings import Report
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import SettingsError, from_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.learner.buffer.ledger import ROWS, read_state
from tidemill.learner.checkpoints import disk, torch_dist
from tidemill.learner.errors import ConfigRefused, PromptError, ReplayMismatch
from tidemill.learner.prompts.formats import data_files
from tidemill.learner.prompts.prompt_file import PlannedRows, PromptFile, prompts_digest

log = logging.getLogger(__name__)

# Entry of `tidemill.learner.buffer.rules.DataRules.identity`, or `lora` -> the setting it comes from.
SETTINGS = {
    "run": "run",
    "seed": "data.seed",
    "prompts_digest": "data.path",
    "model": "model.path",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "lora": "learner.lora",
}
# Families identified by their shape (others by all integers of config.json), fixed for runs of older versions.
BY_SHAPE = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
# Bytes of the largest prompt file that is compared here; a larger one is compared by the feeder.
HASHED_MOST = 256_000_000


def check_resume(report: Report, config: RunConfig) -> None:
    """Compare with the newest checkpoint and, for entries it lacks, with the configuration of the previous start."""
    file = config.root / CONFIG_FILE
    began = began_with(file) if file.exists() else None
    state = _recorded(config.checkpoints)
    then = ({} if began is None else identity(began)) | state.get("identity", {})
    now = identity(config)
    before = len(report.findings)
    for name, setting in SETTINGS.items():
        if name in then and name in now and then[name] != now[name]:
            if name == "prompts_digest" and ROWS in state:
                _compare_rows(report, config, state[ROWS])
                continue
            want = f"{_shown(name, then[name], began)}, with which the run in {config.root} began"
            cure = "undo this change, or start another run: set directory"
            report.error("resume", setting, want=want, got=_shown(name, now[name], config), cure=cure)
    if then and len(report.findings) == before:
        report.good("resume", f"{config.root}: the same model, prompts and sampling as at its start")


def _compare_rows(report: Report, config: RunConfig, rows: JsonMapping) -> None:
    """Report different prompts, as an error where the run has planned one of the rows."""
    data = config.data
    try:
        # Their content alone is compared, so they get no tokens.
        prompts = PromptFile(data.used, tokenize=lambda _: [], max_tokens=0, shuffle=data.shuffle, seed=data.seed)
        differences = PlannedRows(prompts).load(rows)
    except PromptError as error:  # the check of the data names it
        log.debug("prompts not compared error=%s", error)
    except ConfigRefused as error:
        cure = "or start another run: set directory"
        report.error("resume", error.field, want=error.want, got=error.got, cure=cure)
    else:
        want = f"the files with which the run in {config.root} began"
        cure = "the run goes on with these, because it has planned none of them"
        report.warning("resume", "data.path", want=want, got=f"others: {differences}", cure=cure)


def identity(config: RunConfig) -> dict[str, object]:
    """Return the entries of ``DataRules.identity`` that files on disk give, as far as known, and the adapters."""
    data, sampling = config.data, config.sampling
    entries: dict[str, object] = {"run": config.run, "seed": data.seed}
    entries |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    sources = data.used
    try:
        sizes = [file.stat().st_size for source in sources for file in data_files(source.path)]
        if sources and sum(sizes) <= HASHED_MOST:
            entries["prompts_digest"] = prompts_digest(sources, shuffle=data.shuffle, seed=data.seed)
    except (PromptError, OSError) as error:  # the check of the data names it
        log.debug("prompts not compared error=%s", error)
    lora = config.learner.lora
    adapters = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "targets": sorted(lora.targets)}
    entries["lora"] = adapters if lora.rank else "none"
    if model := model_identity(Path(config.model.path), config.model.megatron_checkpoint):
        entries["model"] = model
    return entries


def model_identity(model: Path, megatron_checkpoint: str = "") -> str:
    """Return family, sizes and tokenizer of a model directory, in words and digests; empty if it cannot be read.

    With a checkpoint of Megatron, its iteration and fingerprint follow.
    """
    try:
        values = json.loads((model / "config.json").read_text(encoding="utf-8"))
        family, layers, hidden = (values[name] for name in ("model_type", "num_hidden_layers", "hidden_size"))
        sizes = hashlib.sha256(_sizes(values, str(model)).encode()).hexdigest()[:8]
    except (OSError, ValueError, UnsupportedModel, AttributeError, LookupError, TypeError):
        return ""
    tokenizer = model / "tokenizer.json"
    words = hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:8] if tokenizer.is_file() else "none"
    text = f"{family} of {layers} layers of {hidden} (sizes {sizes}, tokenizer {words})"
    return text if not megatron_checkpoint else f"{text}, weights of {_weights(Path(megatron_checkpoint))}"


def _weights(checkpoint: Path) -> str:
    try:
        iteration = torch_dist.find(checkpoint)
        return torch_dist.described(iteration)
    except (ConfigRefused, OSError) as error:  # the check of the model names it
        return f"{checkpoint}: {error}"


def _sizes(values: JsonMapping, where: str) -> str:
    if values["model_type"] in BY_SHAPE:
        shape = ModelShape.of(values, where=where)
        return repr(shape) if shape.experts is None else repr((shape, shape.experts))
    return repr(sorted((name, value) for name, value in values.items() if type(value) is int))


def began_with(file: Path) -> RunConfig | None:
    """Return the configuration with which the run was last started; None if the file cannot be read."""
    try:
        return from_map(yaml_file.read(file)[0], str(file))
    except (SettingsError, AttributeError) as error:
        log.warning("not compared with the start of the run file=%s error=%s", file, error)
        return None


def _recorded(root: Path) -> JsonObject:
    """Return the state of the data in the newest readable checkpoint; empty without one."""
    for checkpoint in disk.listed(root):
        try:
            return read_state(disk.read_state(checkpoint.path))
        except (OSError, ValueError, KeyError, TypeError, ReplayMismatch) as error:
            log.warning("checkpoint passed over directory=%s error=%s", checkpoint.path, error)
    return {}


def _shown(name: str, value: object, config: RunConfig | None) -> str:
    """Return a value for a message, behind the file that it describes if that is known."""
    place = ""
    if config is not None and name in ("model", "prompts_digest"):
        place = config.model.path if name == "model" else " + ".join(map(str, config.data.used))
    return f"{place}: {value}" if place else repr(value)
