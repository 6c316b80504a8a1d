"""The JSON Schema of the chart's values: the run's configuration by its own schema, everything else by this file.

python -m tidemill.launch.deploy.values_schema > launch/deploy/kubernetes/chart/values.schema.json
"""

import json

from tidemill.bus.section import schema as section_schema
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.run.desired import MOST
from tidemill.launch.settings import reference
from tidemill.learner.settings.config import LearnerConfig

# Settings that the chart sets itself, because they follow from pods, services and volumes.
SET_BY_CHART = ("run", "directory")
BUS_SET_BY_CHART = (
    *("url", "host", "port", "monitoring", "replicas", "auth", "auth_dir", "insecure"),
    *("cluster", "server_name", "cluster_listen", "cluster_routes"),
)
_NOTES = ("$schema", "title", "description", "default", "advanced")
_TEXT: JsonObject = {"type": "string"}
_FLAG: JsonObject = {"type": "boolean"}
_NAME: JsonObject = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$", "maxLength": 253}
_URL: JsonObject = {"type": "string", "pattern": r"^((nats|tls)://[^\s@]+)?$"}
_SIZE: JsonObject = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?)?$"}
_COUNT: JsonObject = {"type": "integer", "minimum": 0, "maximum": MOST}
_SECONDS: JsonObject = {"type": "integer", "minimum": 1}


def schema() -> JsonObject:
    """Return the schema of ``values.yaml``."""
    nodes = section_schema(LearnerConfig)["properties"]["nodes"]
    role: dict[str, JsonObject] = {"count": _COUNT, **_placed()}
    storage: dict[str, JsonObject] = {"size": _SIZE, "storageClass": _NAME}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_closed(
            image={"type": "string", "minLength": 1},
            config=_config(),
            dataClaim=_NAME,
            envSecret=_NAME,
            env={"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
            workers={"enum": ["Job", "Deployment"]},
            audit=_FLAG,
            bus=_closed(servers={"enum": [1, 3]}, url=_URL, authSecret=_NAME, **storage, **_placed()),
            learner=_closed(
                nodes={"type": "integer", "minimum": 1, **{key: nodes[key] for key in ("maximum",) if key in nodes}},
                accessMode={"enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]},
                **storage,
                **_placed(),
            ),
            **{f"{name}s": _closed(**role) for name in ("engine", "actor", "scorer", "router")},
            keda=_closed(
                enabled=_FLAG,
                namespace=_NAME,
                monitoring={"type": "string", "pattern": r"^(\S+:[0-9]{1,5})?$"},
                pollingInterval=_SECONDS,
                cooldownPeriod=_SECONDS,
                engines=_scale(),
                actors=_scale(),
            ),
        ),
    }


def _closed(**properties: JsonObject) -> JsonObject:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _placed() -> dict[str, JsonObject]:
    """Return the properties of a role's pods."""
    return {
        "image": _TEXT,
        "resources": {"type": "object"},
        "nodeSelector": {"type": "object", "additionalProperties": _TEXT},
        "tolerations": {"type": "array", "items": {"type": "object"}},
    }


def _scale() -> JsonObject:
    return _closed(min=_COUNT, max={**_COUNT, "minimum": 1}, tasks={"type": "integer", "minimum": 1})


def _config() -> JsonObject:
    """Return the schema of a configuration file without the settings that the chart sets, and without texts."""
    config = _without_notes(reference.schema())
    properties = {name: part for name, part in config["properties"].items() if name not in SET_BY_CHART}
    bus = properties["bus"]
    kept = {name: part for name, part in bus["properties"].items() if name not in BUS_SET_BY_CHART}
    return {**config, "properties": {**properties, "bus": {**bus, "properties": kept}}}


def _without_notes(schema: JsonObject) -> JsonObject:
    """Return a schema without descriptions and defaults, which are in docs/configuration.md."""
    result = {name: part for name, part in schema.items() if name not in _NOTES}
    for name in ("properties", "patternProperties"):
        if name in result:
            result[name] = {key: _without_notes(part) for key, part in result[name].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(result.get(name), dict):
            result[name] = _without_notes(result[name])
    if "anyOf" in result:
        result["anyOf"] = [_without_notes(part) for part in result["anyOf"]]
    return result


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1, sort_keys=True))
