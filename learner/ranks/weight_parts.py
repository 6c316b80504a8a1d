"""The weights in the parts that the ranks of the learner send: no rank has the whole model, unless one alone trains it.

    stage 0:  rank 0  layers 0, 2   its copy, and all decisions   (publisher)
              rank 1  layers 1, 3   its copy, behind a server     (weightstore/transport/part_server.py)
    stage 1:  rank 2  layers 4, 6   ...

The ranks of a stage that have parts of its tensors gather one after the other; the layers are dealt out to them, and
each keeps its own layers. Rank 0 pushes them, and writes them into files, from the memory of the others. Knows the
policy and the servers; no engine.
"""

import logging
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.bus.client.addresses import Reach, reach, route_to
from tidemill.learner.errors import AlarmStop, FeederFailed, FeederLost
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.trainer.port import Policy
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.adapters import AdapterSettings
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.transport.part_server import PartServer
from tidemill.weightstore.transport.parts import Division, PartPlace, PartTensors, leave, release

log = logging.getLogger(__name__)

_SAID_S = 60.0
"""Interval of the log lines of a rank that waits for rank 0."""
_LEAVE_S = 600.0
"""Longest time of a rank that has ended in seconds: each phase of rank 0's last push has its deadline."""
_ALL_LEAVE = (AlarmStop, FeederFailed, FeederLost)
"""Errors that end all ranks at the same place."""


class WeightParts:
    """This rank's part, and on rank 0 the places of the others. Every rank calls every method but ``release``."""

    def __init__(self, policy: Policy, places: RankPlaces, weights: WeightsConfig) -> None:
        parallel = policy.parallel
        self._policy, self._places, self._weights, self._parallel = policy, places, weights, parallel
        self.adapters = _adapters(policy, places, weights)
        """Settings of the adapters that are pushed in the place of weights; None = weights are pushed."""
        # The base and the adapters are on rank 0 alone: they are added up there, for engines that cannot.
        at_most = weights.senders_per_stage if self.adapters is None else 1
        self._senders = parallel.num_senders(at_most)
        self._several = self._senders * parallel.pp_size > 1
        self._server: PartServer | None = None
        self.division = Division(Manifest([]))
        """This rank's part; on rank 0 also the parts of the other ranks."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Find the tensors of each rank, and serve this part to rank 0. Raises OSError; ValueError without a route."""
        manifest = Manifest.of(self.export())
        self.division = Division(manifest)
        if not self._several:
            yield
            return
        try:
            place = None
            if self._parallel.rank > 0 and manifest.specs:
                self._server = PartServer(manifest, self._weights, rank=self._parallel.rank, at=self._address())
                place = self._server.start()
            places: list[PartPlace | None] = [None] * dist.get_world_size()
            dist.gather_object(place, places if self._parallel.rank == 0 else None, dst=0)
            self.division = Division(
                manifest, tuple(place_of_rank for place_of_rank in places if place_of_rank is not None)
            )
            with self._until_all_is_sent():
                yield
        finally:
            if self._server is not None:
                self._server.close()

    @contextmanager
    def _until_all_is_sent(self) -> Iterator[None]:
        """Serve until rank 0's push has ended, where all ranks leave together. One that fails alone does not wait."""
        try:
            yield
        except _ALL_LEAVE:
            self._leave()
            raise
        self._leave()

    def _leave(self) -> None:
        """Let the other ranks end; on these, wait for that."""
        for place in self.division.remote:
            with suppress(OSError):  # it has ended
                leave(place)
        deadline = time.monotonic() + _LEAVE_S
        while self._server is not None and not self._server.wait_until_left(_SAID_S) and time.monotonic() < deadline:
            log.info("waiting until rank 0 has ended its push rank=%d", self._parallel.rank)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of this rank, whole, as ``Policy.export_part``."""
        return self._policy.export_part(self._senders)

    def export_pushed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of this rank that a version has: its weights, or on rank 0 all adapters."""
        if self.adapters is None:
            return self.export()
        if self._parallel.rank == 0:
            return self._policy.export_adapters()
        self._policy.help_export_adapters()
        return iter(())

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that the adapters belong to, on rank 0; all other ranks get nothing."""
        return self._policy.export_part(self._senders, without_adapters=True)

    def choose(self, copy: int) -> None:
        """Send the number of the copy to fill to the other ranks, which wait for it in ``stage``. On rank 0."""
        if self._several:
            dist.broadcast(torch.tensor(copy, device=self._parallel.device), src=0)

    def stage(self) -> None:
        """Copy this rank's part into the copy that rank 0 has chosen, and wait until all have. Not on rank 0."""
        copy = torch.zeros((), dtype=torch.int64, device=self._parallel.device)
        if self._several:
            dist.broadcast(copy, src=0)
        if self._server is not None:
            self._server.stage(int(copy), self.export())
        else:
            for _ in self.export_pushed():
                pass
        self.staged()

    def staged(self) -> None:
        """Wait until all ranks have filled their copies."""
        # Rank 0 may push as soon as it returns, and would send buckets that another rank is still filling.
        if self._several:
            dist.barrier()

    def whole(self, name: str, local: Mapping[str, Tensor]) -> tuple[Manifest, Mapping[str, Tensor]]:
        """Let rank 0 read the tensors of all ranks, until it calls ``release`` with the same ``name``.

        ``local``: this rank's tensors, on the CPU. Returns manifest and tensors of the whole model on rank 0, where
        tensors of other ranks are read one at a time, and of this rank elsewhere.
        """
        if self._server is not None:
            self._server.offer(name, local)
        self.staged()
        parts = [PartTensors(place, name) for place in self.division.remote]
        return self.division.whole, ChainMap(dict(local), *parts)  # type: ignore[arg-type]

    def release(self, name: str) -> None:
        """Let the other ranks go on: their tensors have been read. On rank 0, in any thread."""
        for place in self.division.remote:
            try:
                release(place, name)
            except OSError as error:  # that rank has ended, or waits until this learner has
                log.warning("release of weights failed rank=%d error=%s", place.rank, error)

    def wait(self, name: str) -> None:
        """Wait until rank 0 has read the tensors that this rank offered by this name."""
        while self._server is not None and not self._server.wait_until_read(name, _SAID_S):
            log.info("waiting until rank 0 has written the weights of this rank rank=%d", self._parallel.rank)

    def _address(self) -> Reach:
        return reach(self._weights.host, self._weights.advertise, route_to(self._places.bus_url), name="weights.host")


def _adapters(policy: Policy, places: RankPlaces, weights: WeightsConfig) -> AdapterSettings | None:
    """Return the settings of the adapters to push; None where merged weights are pushed."""
    if policy.adapters is None or weights.adapters == "merged":
        return None
    if policy.parallel.pp_size > 1:
        if policy.parallel.rank == 0:
            log.info("merged weights are pushed, not adapters: learner.pipeline_parallel > 1")
        return None
    config = policy.adapters.config
    if config.of_experts:
        # No engine adds a matrix of each expert: the decoder and SGLang have linear layers alone, and the runner of
        # transformers has none at all. Merged weights are exact in each of them.
        if policy.parallel.rank == 0:
            log.info("merged weights are pushed, not adapters: learner.lora.targets has weights of experts")
        return None
    return AdapterSettings(scale=config.scale, peft=config.peft(str(places.model_dir)))
