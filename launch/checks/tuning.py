"""Checks of the weights that are trained: frozen names, and directories of adapters. Loads no torch."""

from launch.checks.findings import Report
from launch.devices.trained import Shapes, trained_tensors
from launch.settings.run_config import RunConfig
from learner.lora import adapter_refusals
from learner.schedule import unmatched

FREEZE = "learner.optimizer.freeze"


def check_tuning(report: Report, config: RunConfig, tensors: Shapes) -> None:
    """Report patterns that name no weight, or all of them, and adapters that do not fit the settings. ``tensors``: those of the model."""
    learner = config.learner
    names = list(tensors)
    for pattern in unmatched(learner.optimizer.freeze, names):
        cure = "use the names of the model's safetensors, such as ^model.embed_tokens or layers.[0-3][.]"
        report.error(
            "model", report.at(FREEZE), want="patterns that are found in names of the model's weights", got=repr(pattern), cure=cure
        )
    if not trained_tensors(tensors, learner):
        cure = "leave weights to train"
        report.error("model", report.at(FREEZE), want="weights that are trained", got=repr(list(learner.optimizer.freeze)), cure=cure)
    for refused in adapter_refusals(learner.lora):
        cure = "give the settings of the adapters, or another directory"
        report.error("model", refused.field, want=refused.want, got=repr(refused.got), cure=cure)
