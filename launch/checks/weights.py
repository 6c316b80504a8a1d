"""Checks of the weights that a run begins with and trains: checkpoints, frozen names, adapters. Loads no torch."""

from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.devices.trained import Shapes, stages_of, trained_tensors
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.checkpoints.torch_dist import SETTING, TRACKER
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.lora import adapter_refusals
from tidemill.learner.settings.schedule import unmatched

FREEZE = "learner.optimizer.freeze"
BEGINS = "learner.from_checkpoint"


def check_megatron(report: Report, config: RunConfig) -> None:
    """Report a checkpoint of Megatron that is not complete, by its index; the ranks compare it with the model."""
    if not config.model.megatron_checkpoint:
        return
    try:
        iteration = torch_dist.find(Path(config.model.megatron_checkpoint))
        num_tensors = len(torch_dist.read_index(iteration).shapes)
    except (ConfigRefused, OSError) as error:
        refused = error if isinstance(error, ConfigRefused) else ConfigRefused(SETTING, torch_dist.WANTED, str(error))
        got = str(refused.got) if refused.field == SETTING else f"{refused.field}: {refused.got}"
        cure = "give a complete checkpoint, or remove the setting for the weights of model.path"
        report.error("model", report.at(SETTING), want=refused.want, got=got, cure=cure)
        return
    report.good("model", f"{SETTING}: {iteration}, {num_tensors} tensors in its index; the run begins with the model's")


def check_tuning(report: Report, config: RunConfig, tensors: Shapes) -> None:
    """Report patterns that name no weight or all of them, and adapters that do not fit. ``tensors``: the model's."""
    learner = config.learner
    names = list(tensors)
    for pattern in unmatched(learner.optimizer.freeze, names):
        cure = "use the names of the model's safetensors, such as ^model.embed_tokens or layers.[0-3][.]"
        want = "patterns that are found in names of the model's weights"
        report.error("model", report.at(FREEZE), want=want, got=repr(pattern), cure=cure)
    if learner.lora.rank:
        adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained_tensors(tensors, learner)}
        if missing := sorted(set(learner.lora.targets) - adapted):
            want = (
                f"layers of this model that can have adapters ({', '.join(sorted(adapted)) or 'none'}); experts "
                "have none"
            )
            got = ", ".join(missing)
            report.error("model", report.at("learner.lora.targets"), want=want, got=got, cure="leave them out")
    setting, choice = (
        ("learner.lora.targets", learner.lora.targets) if learner.lora.rank else (FREEZE, learner.optimizer.freeze)
    )
    stages = stages_of(tensors, learner.pipeline_parallel, learner.virtual_pipeline, edge_layers=learner.edge_layers)
    idle = [number for number, stage in enumerate(stages) if not trained_tensors(stage, learner)]
    if len(idle) == len(stages):
        cure = "leave weights to train"
        got = repr(list(learner.optimizer.freeze))
        report.error("model", report.at(FREEZE), want="weights that are trained", got=got, cure=cure)
    elif idle:
        got = f"{list(choice)}: stage {idle[0]} would train nothing"
        want = "weights that are trained in every stage of the pipeline"
        cure = "lower learner.pipeline_parallel, or choose other layers"
        report.error("model", report.at(setting), want=want, got=got, cure=cure)
    if learner.from_checkpoint:
        _check_beginning(report, Path(learner.from_checkpoint))
    for refused in adapter_refusals(learner.lora):
        cure = "give the settings of the adapters, or another directory"
        report.error("model", refused.field, want=refused.want, got=repr(refused.got), cure=cure)


def _check_beginning(report: Report, directory: Path) -> None:
    """Report a directory that is no checkpoint of Tidemill; its content is verified when the run starts."""
    if (directory / MANIFEST).is_file() and (directory / "common.pt").is_file():
        return
    got, cure = f"{directory}: no {MANIFEST}", "give a directory below checkpoints/ of a run"
    if not directory.is_dir():
        got = f"{directory}: no such directory"
    elif (directory / "config.json").is_file():
        got = f"{directory}: a model directory"
        cure = "make it model.path, or convert it: tidemill convert MODEL CHECKPOINT"
    elif (directory / "common.pt").is_file() or (directory / TRACKER).is_file():
        got += ", as in checkpoints of Megatron itself"
        cure = "make it model.megatron_checkpoint"
    report.error("model", report.at(BEGINS), want="a checkpoint of Tidemill", got=got, cure=cure)
