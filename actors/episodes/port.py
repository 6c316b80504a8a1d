"""A rollout as the actor's loop sees it: from a task to one unscored or scored sample. Knows no engine and no bus."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tidemill.bus.errors import DetailedError
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Partial, Sample, Task


@dataclass(slots=True, kw_only=True)
class Made:
    """A sample of a rollout."""

    sample: Sample
    """Unscored; the actor's loop puts the scored one in its place."""
    scored: bool = False
    """True if the rollout has given its reward; else it is 0, and the actor's reward scores it."""
    continued: bool = False
    """True if another actor had begun it."""
    stored: Callable[[int], Awaitable[None]] | None = None
    """To be called with the sequence of the sample once it is stored. Raises Superseded."""


class Unfinished(DetailedError):
    """There is no sample, for a reason outside the task: no engine was found, or this process is leaving."""

    reason: str
    partial: Partial | None = None
    turns: int = 0
    """Number of turns that are not stored, and are generated again."""
    template = "{reason}"


class AlreadyStored(DetailedError):
    """An earlier actor has made the sample, and stored it as sequence ``seq`` of SAMPLES."""

    seq: int
    template = "stored as sequence {seq} of SAMPLES"


class Rollout(Protocol):
    """Makes the samples of tasks, many at once."""

    @property
    def drain_s(self) -> float | None:
        """Seconds that its samples may go on when the actor drains; None = as the actor's settings have it."""
        ...

    async def group(self, task: Task, attempt: str) -> list[Made | Partial | None]:
        """Make samples of a task that no actor has begun together, where that is cheaper.

        Returns samples and unfinished responses by index; ``sample`` makes the others, and all of an empty list. Raises
        Unfinished for all.
        """
        ...

    async def sample(
        self, task: Task, index: int, attempt: str, partial: Partial | None = None, *, first: bool = True
    ) -> Made:
        """Make sample ``index`` of a task. ``first``: no actor had the task before.

        Raises GenerationFailed (a FAILED sample), Unfinished (the task is handed back), AlreadyStored, and Superseded
        when another actor makes the sample now.
        """
        ...

    def interrupt(self) -> None:
        """End, as Unfinished, the samples that wait for something other than an engine. From now on none is begun."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """The result that a program has returned for an episode."""

    value: float | Mapping[str, float] | None = None
    """The reward, parts of it by name, rewards of turns by id, or none."""
    fault: float | None = None
    """Reward of an episode that ended by a fault of the policy (``PolicyFault``); None = it did not."""


class ProgramFailed(DetailedError):
    """A program raised, returned something that is no result, could not be loaded, or its process ended."""

    reason: str
    ended: bool = False
    """True if its process ended, or was not started: the episode's turns are as good as before."""
    template = "{reason}"


class Programs(Protocol):
    """Runs a program, once for each episode, many at once."""

    async def run(self, episode: str, *, base_url: str, api_key: str, task: JsonMapping) -> EpisodeResult:
        """Run it to its end. Raises ProgramFailed. When cancelled, the program is ended."""
        ...
