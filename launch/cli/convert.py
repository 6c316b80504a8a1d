"""``tidemill convert``: a learner's checkpoint as a Hugging Face directory, or a Hugging Face directory as a checkpoint."""

import logging
import os
from pathlib import Path

from bus.server.ports import KeptPort
from launch.checks.resume import began_with
from launch.settings.run_config import CONFIG_FILE, RunConfig
from learner.errors import LearnerError


def run_convert(source: Path, out: Path, model: Path | None, bridge: str = "") -> int:
    """Convert by the kind of ``source``, in this process, on the CPU. Returns 0. Raises ValueError with the reason in one line.

    ``bridge``: import path of the bridge of the model's family; empty = that of the run that has written the checkpoint.
    """
    if out.exists():
        raise ValueError(f"{out}: want a directory that does not exist yet, got one that does")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with KeptPort() as port:
        # Before torch looks for devices: this needs none.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from learner.megatron import convert

        try:
            if convert.is_checkpoint(source):
                run = _run_of(source)
                model_dir = model or _model_of(source, run)
                bridge = bridge or (run.learner.bridge if run is not None else "")
                with convert.one_process() as here:
                    step = convert.to_model(source, out, model_dir, here, bridge_class=bridge)
                print(f"{out}: the model of step {step}")
            elif (source / "config.json").is_file():
                if model is not None:
                    raise ValueError(f"--model: want none with a model directory, got {model}")
                with convert.one_process() as here:
                    convert.to_checkpoint(source, out, here, bridge_class=bridge)
                print(f"{out}: a checkpoint with its weights, for learner.from_checkpoint")
            else:
                files = ", ".join(convert.MEGATRON)
                raise ValueError(f"{source}: want a checkpoint ({files}) or a model directory (config.json), got neither")
        except (LearnerError, OSError) as error:
            raise ValueError(" ".join(str(error).split())) from error
    return 0


def _run_of(checkpoint: Path) -> RunConfig | None:
    """Return the configuration of the run that has written a checkpoint; None if it lies in no run's directory."""
    file = _config_file(checkpoint)
    return began_with(file) if file.is_file() else None


def _config_file(checkpoint: Path) -> Path:
    return checkpoint.absolute().parent.parent / CONFIG_FILE


def _model_of(checkpoint: Path, run: RunConfig | None) -> Path:
    """Return the model directory of a run. Raises ValueError."""
    if run is None or not run.model.path:
        raise ValueError(
            f"--model: want the model directory of {checkpoint}, which lies in no run's directory (no {_config_file(checkpoint)}); "
            "give --model DIR"
        )
    return Path(run.model.path)
