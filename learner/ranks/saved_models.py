"""Models as Hugging Face directories: the trained one, and ``models/step-<k>``, written by a thread while training goes
on.

    step k     after    all ranks that send weights: copy their part to host memory   (all that a step waits for)
    meanwhile  thread   rank 0: read the parts, write the directory aside, rename it into place, remove old ones

Models of steps are not the state of a run: an error of the disk is logged, and the run goes on. A model is kept while
it is one of the newest, or while its step has a checkpoint, which the best step (``eval.best``) has.
"""

import logging
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from tidemill.learner.checkpoints import disk
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.ranks.weight_parts import WeightParts
from tidemill.learner.trainer import exports
from tidemill.learner.trainer.exports import ADAPTER, write_adapter
from tidemill.learner.trainer.port import Policy
from tidemill.weightstore.format.manifest import Manifest

log = logging.getLogger(__name__)

SAVED = "saved"
"""Name of the set of tensors that rank 0 writes into the directory of a step."""
FINAL = "final"
"""Name of the set of tensors that rank 0 writes into the directory of the trained model."""
_NAME = re.compile(r"step-(\d+)")


class SavedModels:
    """The models of one start of the learner. Every rank calls every method at the same place."""

    def __init__(self, policy: Policy, parts: WeightParts, places: RankPlaces, *, every: int, keep: int) -> None:
        """``every``: steps; 0 = none are written. ``keep``: newest models that are kept; 0 = all."""
        self._policy, self._parts, self._places, self._every, self._keep = policy, parts, places, every, keep
        self._root = places.final_dir.with_name("models")
        self._leads = policy.parallel.rank == 0
        self._writing: threading.Thread | None = None

    def after(self, step: int, *, checkpointed: bool) -> None:
        """Save the current weights, those after ``step``, if they are due: every so many steps, and where there is a
        checkpoint."""
        if not self._every or (step % self._every and not checkpointed):
            return
        self.wait()
        manifest, tensors = self._parts.whole(SAVED, _copied(self._parts.export()))
        if not self._leads:
            self._policy.help_export_adapters()
            return
        adapter = {} if self._policy.adapters is None else _copied(self._policy.export_adapters())
        # A daemon: a rank that ends with an error does not wait for the disk; the directory is renamed when it is
        # whole.
        self._writing = threading.Thread(
            target=self._write, args=(step, manifest, tensors, adapter), name="saved-model", daemon=True
        )
        self._writing.start()

    def wait(self) -> None:
        """Wait until the model before is written, or could not be."""
        self._parts.wait(SAVED)
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def write_trained(self, step: int, version: int) -> None:
        """Write the current weights as the trained model, and wait. ``version``: -1 = not published. Raises OSError."""
        manifest, tensors = self._parts.whole(FINAL, {name: tensor.to("cpu") for name, tensor in self._parts.export()})
        if not self._leads:
            self._policy.help_export_adapters()
            self._parts.wait(FINAL)
            return
        adapter = {} if self._policy.adapters is None else dict(self._policy.export_adapters())
        directory = self._places.final_dir
        try:
            exports.write_model(
                directory, tensors, version=version, step=step, model_dir=self._places.model_dir, manifest=manifest
            )
        finally:
            self._parts.release(FINAL)
        self._write_adapter(directory, adapter)
        log.info("trained model=%s step=%d", directory, step)

    def _write(
        self, step: int, manifest: Manifest, tensors: Mapping[str, Tensor], adapter: Mapping[str, Tensor]
    ) -> None:
        directory = self._root / f"step-{step}"
        try:
            if not directory.exists():  # a repeated step has the same weights
                exports.write_model(
                    directory, tensors, version=-1, step=step, model_dir=self._places.model_dir, manifest=manifest
                )
            if not (directory / ADAPTER).exists():
                self._write_adapter(directory, adapter)
            log.info("model saved step=%d directory=%s", step, directory)
            prune(self._root, self._places.checkpoints, keep=self._keep)
        except OSError as error:
            log.error("the model of step %d is not saved: %s", step, error)
        finally:
            self._parts.release(SAVED)

    def _write_adapter(self, directory: Path, adapter: Mapping[str, Tensor]) -> None:
        if self._policy.adapters is not None:
            write_adapter(directory / ADAPTER, adapter, self._policy.adapters.config, self._places.model_dir)


def prune(root: Path, checkpoints: Path, *, keep: int) -> None:
    """Remove models, but not the ``keep`` newest (0 = all), nor at steps with a checkpoint. Raises OSError."""
    models = sorted((int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))
    spared = disk.unfinished(checkpoints)  # read first: in between, a checkpoint may be renamed into place
    spared |= {checkpoint.step for checkpoint in disk.listed(checkpoints)}
    for step, path in models[:-keep] if keep else ():
        if step not in spared:
            shutil.rmtree(path)
            log.info("model removed directory=%s", path)


def _copied(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies in host memory, which the next step does not change."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
