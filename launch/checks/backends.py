"""Checks of what one backend of the learner alone has or lacks: layouts, families, settings. Loads no torch."""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.bus.wire.model_values import EXPERTS_OF
from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints.disk import written_by
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.model_files import HEADS_SETTING, count_heads
from tidemill.learner.layout.sizes import FAMILIES, WITH_BIAS, refusals
from tidemill.learner.settings.backends import MEGATRON, NO_MTP
from tidemill.learner.settings.backends import refusals as argument_refusals

SETTING = "model.path"
# Settings of the learner that divide a model.
SPLITS = (
    *("tensor_parallel", "sequence_parallel", "context_parallel", "expert_parallel"),
    *("pipeline_parallel", "virtual_pipeline", "first_stage_layers", "last_stage_layers"),
)


def check_backend(report: Report, config: RunConfig, values: Mapping[str, object], where: str, kind: str) -> None:
    """Report values of a model and settings that the backend of this kind cannot train. ``where``: of the values."""
    if kind == MEGATRON:
        if factor := config.learner.mtp_loss_scaling_factor:
            cure = "remove it, or what needs Megatron"
            report.error("model", "learner.mtp_loss_scaling_factor", want=NO_MTP, got=factor, cure=cure)
        _check_layout(report, config, values, where)
        _check_settings(report, config, values)
    else:
        _check_transformers(report, config, values, where)
        if config.learner.mtp_loss_scaling_factor:
            _check_heads(report, config, values, made=where == "prepare")
    _check_beginning(report, config.learner.from_checkpoint, kind)
    for refused in argument_refusals(config.learner.megatron):
        cure = "see docs/parallelism.md, or remove it"
        report.error("model", refused.field, want=refused.want, got=refused.got, cure=cure)


def _check_beginning(report: Report, checkpoint: str, kind: str) -> None:
    """Refuse a checkpoint of the other backend as the beginning of a run."""
    if not checkpoint or not (Path(checkpoint) / MANIFEST).is_file():  # ``check_tuning`` names what it is
        return
    if (writer := written_by(Path(checkpoint))) != kind:
        want, got = f"a checkpoint of learner.backend: {kind}", f"{checkpoint}, of {writer}"
        cure = f"set learner.backend={writer}, or make it a model directory (tidemill convert) and model.path"
        report.error("model", "learner.from_checkpoint", want=want, got=got, cure=cure)


def _check_layout(report: Report, config: RunConfig, values: Mapping[str, object], where: str) -> None:
    """Refuse values that the learner cannot train, or cannot divide over its ranks."""
    has_bridge, splits = bool(config.learner.bridge), {name: getattr(config.learner, name) for name in SPLITS}
    for refused in refusals(values, where=where, own_bridge=has_bridge, **splits):
        named = [f"learner.{name}" for name in SPLITS if f"learner.{name}" in refused.want]
        cure = f"lower {' or '.join(named)}" if named else "use another model"
        report.error("model", refused.field, want=refused.want, got=refused.got, cure=f"{cure} ({report.at(SETTING)})")


def _check_transformers(report: Report, config: RunConfig, values: Mapping[str, object], where: str) -> None:
    """Refuse models that transformers cannot train, and settings that FSDP lacks."""
    family, known = values.get("model_type"), language_models()
    if known and family not in known and not config.learner.family:
        want = f"one of the {len(known)} that the installed transformers has a language model for, or learner.bridge"
        cure = "use another model, or register its classes in a module of yours: learner.family (docs/families.md)"
        report.error("model", f"{where}: model_type", want=want, got=family, cure=cure)
    if config.model.megatron_checkpoint:
        want, got = "none with learner.backend: fsdp", config.model.megatron_checkpoint
        report.error("model", "model.megatron_checkpoint", want=want, got=got, cure="remove learner.backend")


def _check_heads(report: Report, config: RunConfig, values: Mapping[str, object], *, made: bool) -> None:
    """Refuse models without heads that can be trained, and patterns that freeze all of them. ``made``: at the start."""
    if made:
        got, want = config.learner.mtp_loss_scaling_factor, "0 for a model that is made at the start, without heads"
        report.error("model", HEADS_SETTING, want=want, got=got, cure="remove it")
        return
    try:
        path, freeze = Path(config.model.path), config.learner.optimizer.freeze
        count_heads(str(values.get("model_type")), path, freeze=freeze)
    except ConfigRefused as refused:
        report.error("model", refused.field, want=refused.want, got=refused.got, cure="remove it")
    except (OSError, ValueError, LookupError):  # of damaged files, which the check of the weights reports
        return


def _check_settings(report: Report, config: RunConfig, values: Mapping[str, object]) -> None:
    learner, family = config.learner, values.get("model_type")
    experts, biased = family in EXPERTS_OF, family in WITH_BIAS
    if family not in FAMILIES:
        return
    refused = {
        "routing_replay": learner.routing_replay != "none" and not experts,
        "moe_aux_loss_coef": learner.moe_aux_loss_coef > 0 and not experts,
        "moe_bias_update_rate": learner.moe_bias_update_rate > 0 and not biased,
        "offload_optimizer": learner.offload_optimizer and experts,
        "optimizer.name": learner.optimizer.name == "sgd" and experts,
    }
    has = {"moe_bias_update_rate": "no bias per expert"}
    for name in (name for name, wrong in refused.items() if wrong):
        want = f"its default for {family}, which has {has.get(name, 'experts' if experts else 'no experts')}"
        report.error("model", f"learner.{name}", want=want, got=getattr(learner, name), cure="remove the setting")


def check_megatrons_critic(report: Report, config: RunConfig, values: Mapping[str, Any], where: str) -> None:
    """Report values of the critic's model that Megatron cannot train. ``where``: the setting of its path."""
    learner, path = config.learner, Path(config.learner.critic.path)
    has_bridge, splits = bool(learner.bridge), {name: getattr(learner, name) for name in SPLITS}
    for refused in refusals(values, where=f"{path}/config.json", own_bridge=has_bridge, **splits):
        report.error("critic", refused.field, want=refused.want, got=refused.got, cure=f"use another model ({where})")
    if learner.offload_optimizer and values.get("model_type") in EXPERTS_OF:
        want = f"false with a critic that has experts ({values['model_type']} in {path})"
        cure = "remove the setting, or use another critic"
        report.error("critic", "learner.offload_optimizer", want=want, got=True, cure=cure)


_FILE, _NAMES = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@functools.cache
def language_models() -> frozenset[str]:
    """Return the values of ``model_type`` with a language model in the installed transformers, read from its source.

    Empty where it is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0], _FILE).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == _NAMES for target in node.targets):
            assert isinstance(node.value, ast.Call)
            return frozenset(name for name, _ in ast.literal_eval(node.value.args[0]))
    raise ImportError(f"transformers has no {_NAMES} in {_FILE}")
