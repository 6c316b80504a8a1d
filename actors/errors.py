"""The error tree of actors and engines. HTTP codes and aiohttp's errors are translated into these at the edge."""

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError


class ActorRefused(DetailedError):
    """The learner has found so many invalid samples of this actor in a row that it expects no valid one."""

    actor: str
    invalid: int
    reason: str
    template = "actor {actor}: refused by the learner: {invalid} invalid samples in a row, the last one: {reason}"


class ServerFault(Exception):
    """A server of a pool failed. It gets no requests for a while (``actors/engines/server_pool.py``)."""


class EngineError(Exception):
    """Something went wrong between an actor and an engine, or inside an engine."""


class EngineUnavailable(DetailedError, EngineError, ServerFault):
    """The engine cannot be reached, does not serve, is full, or did not answer in time. Another one may serve it."""

    engine: str
    reason: str
    template = "engine {engine}: unavailable: {reason}"


class EngineGone(EngineUnavailable):
    """The connection broke (not: was refused) while the engine worked on the request: it died or was ended."""


class VersionUnavailable(EngineUnavailable):
    """The engine did not serve the requested minimum version in time."""


class EngineFailed(DetailedError, EngineError, ServerFault):
    """The engine accepted the request and could not complete it (its own fault, HTTP 500), or its answer is invalid."""

    engine: str
    reason: str
    template = "engine {engine}: failed: {reason}"


class ScorerUnavailable(DetailedError, ServerFault):
    """A scorer cannot be reached, is full, or refuses this process: the request was not scored."""

    scorer: str
    reason: str
    template = "scorer {scorer}: {reason}"


class ScorerLost(ScorerUnavailable):
    """A scorer ended, froze, or sent an invalid answer, while it worked on the request."""


class BadRequest(DetailedError, EngineError, ValueError):
    """The request can never be served as it is. The reason names the field, the accepted and the received value."""

    reason: str
    template = "{reason}"


class StaleEpoch(DetailedError, EngineError):
    """A command of a learner that has been replaced: the engine has seen a higher epoch."""

    what: str
    mine: int
    seen: int
    template = "{what}: epoch {mine} is stale, epoch {seen} was seen: another learner has taken over this run"


class UpdateRefused(DetailedError, EngineError):
    """A weight update that is incomplete, out of order or does not fit the model; the served weights are untouched."""

    reason: str
    template = "weight update refused: {reason}"


class CannotTell(DetailedError, EngineError):
    """The engine has no checksums that can be compared with another process's."""

    engine: str
    reason: str
    template = "engine {engine}: no checksums: {reason}"


class PeerTransferRefused(DetailedError, EngineError):
    """The engine does not have the requested snapshot; another engine may."""

    reason: str
    template = "snapshot {reason}"


class UnsupportedModel(DetailedError, EngineError, ValueError):
    """A model or prompt cannot be computed. The reason names the setting, the accepted and the received value."""

    exit_code = exit_codes.CONFIG
    where: str
    reason: str
    template = "{where}: {reason}"


class NotDecoded(UnsupportedModel):
    """The built-in engine's decoder lacks the model; the library transformers may run it."""


class NoDevice(DetailedError, EngineError, ValueError):
    """The settings want a device that this machine does not have."""

    exit_code = exit_codes.CONFIG
    setting: str
    want: str
    got: str
    template = "{setting}: want {want}, got {got!r}"


class NotAllowed(DetailedError, EngineError, ValueError):
    """The run's row on the bus names code, a program, environment or a file that this machine has not allowed."""

    exit_code = exit_codes.CONFIG
    where: str
    named: str
    cure: str
    template = "{where}: {named}; not accepted from the bus unless this machine allows it: {cure} (or TIDEMILL_ALLOW)"


class BadRow(DetailedError, EngineError, ValueError):
    """The run's row on the bus has a setting that this version does not know, or a value that cannot be used."""

    exit_code = exit_codes.CONFIG
    reason: str
    template = "{reason}"


class NoRenderer(DetailedError, ValueError):
    """The renderer of the settings cannot be used: it is unknown, or the model's tokenizer does not fit."""

    want: str
    got: str
    cure: str
    setting: str = "renderer"
    """Name of the setting within its section."""
    template = "{setting}: want {want}, got {got}; {cure}"


class RendererMissing(NoRenderer):
    """This environment lacks the packages of renderers."""
