"""Versions of the weights: their registry, pushes to the engines, and snapshots for engines that join late."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.weightstore.format.manifest import Bucket, TensorSpec, unflatten
    from tidemill.weightstore.transport.parts import Payload
    from tidemill.weightstore.transport.port import Rendezvous, WeightReceiver

_MODULES = {
    "Bucket": "format.manifest",
    "Payload": "transport.parts",
    "Rendezvous": "transport.port",
    "TensorSpec": "format.manifest",
    "WeightReceiver": "transport.port",
    "unflatten": "format.manifest",
}
__all__ = ["Bucket", "Payload", "Rendezvous", "TensorSpec", "WeightReceiver", "unflatten"]
__getattr__ = public_names(__name__, _MODULES)
