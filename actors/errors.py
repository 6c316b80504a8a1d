"""The error tree of actors and engines. HTTP codes and aiohttp's errors are translated into these at the edge."""

from tidemill.bus import exit_codes


class ActorRefused(Exception):
    """The learner has found so many invalid samples of this actor in a row that it expects no valid one."""

    def __init__(self, actor: str, invalid: int, reason: str) -> None:
        super().__init__(actor, invalid, reason)
        self.actor, self.invalid, self.reason = actor, invalid, reason

    def __str__(self) -> str:
        return (
            f"actor {self.actor}: refused by the learner: {self.invalid} invalid samples in a row, the last one: "
            f"{self.reason}"
        )


class ServerFault(Exception):
    """A server of a pool could not do its work: it is left alone for a while (``actors/engines/server_pool.py``), and
    another may do it.
    """


class EngineError(Exception):
    """Something went wrong between an actor and an engine, or inside an engine."""


class EngineUnavailable(EngineError, ServerFault):
    """The engine cannot be reached, does not serve, is full, or did not answer within the deadline.

    Another one may serve the request.
    """

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, reason)
        self.engine, self.reason = engine, reason

    def __str__(self) -> str:
        return f"engine {self.engine}: unavailable: {self.reason}"


class EngineGone(EngineUnavailable):
    """The connection broke while the engine worked on the request: it died or was ended.

    A refused connection does not count.
    """


class VersionUnavailable(EngineUnavailable):
    """The engine did not serve the requested minimum version in time."""


class EngineFailed(EngineError, ServerFault):
    """The engine accepted the request and could not complete it (its own fault, HTTP 500), or its answer cannot be
    parsed.
    """

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, reason)
        self.engine, self.reason = engine, reason

    def __str__(self) -> str:
        return f"engine {self.engine}: failed: {self.reason}"


class ScorerUnavailable(ServerFault):
    """A scorer cannot be reached, is full, or refuses this process: the request was not scored."""

    def __init__(self, scorer: str, reason: str) -> None:
        super().__init__(scorer, reason)
        self.scorer, self.reason = scorer, reason

    def __str__(self) -> str:
        return f"scorer {self.scorer}: {self.reason}"


class ScorerLost(ScorerUnavailable):
    """A scorer ended, froze, or answered what is no answer, while it worked on the request."""


class BadRequest(EngineError, ValueError):
    """The request can never be served as it is.

    The reason names the field, the values it accepts and the value received.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StaleEpoch(EngineError):
    """A command of a learner that has been replaced: the engine has seen a higher epoch."""

    def __init__(self, what: str, mine: int, seen: int) -> None:
        super().__init__(what, mine, seen)
        self.what, self.mine, self.seen = what, mine, seen

    def __str__(self) -> str:
        return (
            f"{self.what}: epoch {self.mine} is stale, epoch {self.seen} was seen: another learner has taken over "
            "this run"
        )


class UpdateRefused(EngineError):
    """A weight update that is incomplete, out of order or does not fit the model; the served weights are untouched."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"weight update refused: {self.reason}"


class CannotTell(EngineError):
    """The engine has no checksums that can be compared with another process's."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, reason)
        self.engine, self.reason = engine, reason

    def __str__(self) -> str:
        return f"engine {self.engine}: no checksums: {self.reason}"


class PeerTransferRefused(EngineError):
    """The engine does not have the requested snapshot; another engine may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"snapshot {self.reason}"


class UnsupportedModel(EngineError, ValueError):
    """An implementation cannot compute this model or prompt.

    The reason names the setting, the values it accepts and the one received.
    """

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class NoDevice(EngineError, ValueError):
    """The settings want a device that this machine does not have."""

    exit_code = exit_codes.CONFIG

    def __init__(self, setting: str, want: str, got: str) -> None:
        super().__init__(setting, want, got)
        self.setting, self.want, self.got = setting, want, got

    def __str__(self) -> str:
        return f"{self.setting}: want {self.want}, got {self.got!r}"


class NotAllowed(EngineError, ValueError):
    """The run's row on the bus names code, a program, environment or a file that this machine has not allowed."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, named: str, cure: str) -> None:
        super().__init__(where, named, cure)
        self.where, self.named, self.cure = where, named, cure

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.named}; not accepted from the bus unless this machine allows it: {self.cure} "
            "(or TIDEMILL_ALLOW)"
        )


class BadRow(EngineError, ValueError):
    """The run's row on the bus has a setting that this version does not know, or a value that cannot be used."""

    exit_code = exit_codes.CONFIG

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class NoRenderer(ValueError):
    """The renderer of the settings cannot be used: it is unknown, or the model's tokenizer does not fit."""

    def __init__(self, want: str, got: str, cure: str, setting: str = "renderer") -> None:
        """``setting``: name of the setting within its section."""
        super().__init__(want, got, cure, setting)
        self.setting, self.want, self.got, self.cure = setting, want, got, cure

    def __str__(self) -> str:
        return f"{self.setting}: want {self.want}, got {self.got}; {self.cure}"


class RendererMissing(NoRenderer):
    """This environment lacks the packages of renderers."""
