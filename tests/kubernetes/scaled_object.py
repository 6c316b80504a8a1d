"""JSON Schema of the part of KEDA's ScaledObject that the chart uses, closed: kubernetes-validate knows no such kind.

Source: config/crd/bases/keda.sh_scaledobjects.yaml of kedacore/keda 2.16, and the parameters of its nats-jetstream
scaler (pkg/scalers/nats_jetstream_scaler.go).
"""

from typing import Any


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


_TEXT, _COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
_NUMBER = {"type": "string", "pattern": "^[0-9]+$"}
_TRIGGER = _closed(
    "type metadata",
    type={"enum": ["nats-jetstream"]},
    metadata=_closed(
        "natsServerMonitoringEndpoint account stream consumer lagThreshold",
        natsServerMonitoringEndpoint=_TEXT,
        account=_TEXT,
        stream=_TEXT,
        consumer=_TEXT,
        lagThreshold=_NUMBER,
        activationLagThreshold=_NUMBER,
    ),
)
SCALED_OBJECT = _closed(
    "apiVersion kind metadata spec",
    apiVersion={"enum": ["keda.sh/v1alpha1"]},
    kind={"enum": ["ScaledObject"]},
    metadata=_closed("name labels", name=_TEXT, labels={"type": "object"}),
    spec=_closed(
        "scaleTargetRef triggers",
        scaleTargetRef=_closed("name", apiVersion=_TEXT, kind={"enum": ["Deployment", "StatefulSet"]}, name=_TEXT),
        pollingInterval=_COUNT,
        cooldownPeriod=_COUNT,
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        triggers={"type": "array", "items": _TRIGGER},
    ),
)
