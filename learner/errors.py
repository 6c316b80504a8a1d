"""The error tree of the learner."""

from collections.abc import Mapping

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError

NEW_RUN = (
    "begin a new run with the model of a checkpoint "
    "(tidemill up CONFIG --from-checkpoint CHECKPOINT --set directory=NEW)"
)


class LearnerError(Exception):
    """Base class of the learner's errors."""


class WrongContent(DetailedError, LearnerError):
    """Something has other content than it must have."""

    where: str
    want: str
    got: object
    template = "{where}: want {want}, got {got}"


class ConfigRefused(DetailedError, LearnerError, ValueError):
    """Settings contradict each other, or the records of an earlier start of this run."""

    exit_code = exit_codes.CONFIG
    field: str
    want: str
    got: object
    template = "{field}: want {want}, got {got!r}"


class SamplesGone(DetailedError, LearnerError):
    """A shadow learner cannot read a step of the run it follows any more."""

    exit_code = exit_codes.CONFIG
    run: str
    step: int
    reason: str
    template = (
        "run {run}, step {step}: {reason}; cure: --from-checkpoint of a later step, or a larger bus.history_samples"
    )


class FirstRankFailed(DetailedError, LearnerError, RuntimeError):
    """Rank 0, which reads a model for all ranks, has failed; its log has the traceback."""

    reason: str
    template = "rank 0 could not read the model: {reason}"


class PromptError(WrongContent, ValueError):
    """A prompt file, or one of its rows, cannot be used."""

    exit_code = exit_codes.CONFIG


class CannotRender(LearnerError, ValueError):
    """The tokenizer or the chat template rejects a row."""


class TextTooLong(DetailedError, LearnerError, ValueError):
    """A text is too long for a number of tokens, by its length alone."""

    max_tokens: int
    num_bytes: int
    template = "want a text of at most {max_tokens} tokens, got one of {num_bytes} bytes"


class TemplateLacks(LearnerError, ValueError):
    """The model has no chat template, or one that leaves out what rows have: no cause that is a row's own."""


class DebugFileRefused(WrongContent, ValueError):
    """A file of recorded samples, or a dump of a step, is missing or cannot be read."""

    exit_code = exit_codes.CONFIG


class ReplayMismatch(DetailedError, LearnerError):
    """The streams do not continue the checkpoint: training from it would not repeat the recorded steps."""

    exit_code = exit_codes.CONFIG
    where: str
    want: object
    got: object
    template = "{where}: want {want}, got {got}"


class HookFailed(DetailedError, LearnerError):
    """A hook of the user has raised an error, which ends the rank."""

    setting: str
    path: str
    step: int
    reason: str
    template = "{setting}: {path} failed at step {step}: {reason}"


class CheckpointCorrupt(DetailedError, LearnerError):
    """A file of a checkpoint is missing, or its size or digest differs from the manifest."""

    directory: str
    file: str
    want: object
    got: object
    template = "{directory}/{file}: want {want}, got {got}"


class StoreFailed(DetailedError, LearnerError):
    """The store of checkpoints cannot be reached now, or refuses a request."""

    where: str
    reason: str
    template = "{where}: {reason}"


class CheckpointUnwritten(DetailedError, LearnerError):
    """A checkpoint cannot be written, as on a full disk. The next start loads the one before it."""

    directory: str
    reason: str
    template = "{directory}: cannot be written: {reason}"


class NoCheckpoint(DetailedError, LearnerError):
    """The run has a checkpoint according to its row on the bus, but none of those on disk can be used."""

    exit_code = exit_codes.CONFIG
    directory: str
    reason: str
    template = (
        "{directory}: no usable checkpoint: {reason}; put a whole copy of one back there, "
        "or throw the run away (tidemill up CONFIG --fresh)"
    )


class RunLost(DetailedError, LearnerError):
    """Checkpoints exist, but the bus has no record of their run: its position in the data is lost."""

    exit_code = exit_codes.CONFIG
    run: str
    newest: str
    template = (
        "{newest}: want the bus's records of run {run} up to this checkpoint, got a bus with no row run/checkpoint "
        "and no plan of it: its store was emptied, or it is another bus. Put the bus's store back; or {new_run}; "
        "or throw the checkpoints away (tidemill up CONFIG --fresh)"
    )

    @property
    def new_run(self) -> str:
        """How to begin a new run with the newest checkpoint."""
        return NEW_RUN.replace("CHECKPOINT", self.newest)


class NothingTrained(DetailedError, LearnerError):
    """All prompts of the run's passes are settled, and no group of them could be trained."""

    exit_code = exit_codes.CONFIG
    num_epochs: int
    dropped: Mapping[str, int]
    last_failure: str = ""

    def __str__(self) -> str:
        passes = f"{self.num_epochs} pass{'es' * (self.num_epochs > 1)}"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        failure = f"; the last that failed: {self.last_failure}" if self.last_failure else ""
        return (
            f"learner.num_epochs: want a group to train in {passes} over the prompts, got none (tasks: "
            f"{reasons}{failure}); look at the data, the rewards and `tidemill dead`"
        )


class TasksFail(DetailedError, LearnerError):
    """Every task fails: so many in a row have died, without a complete group between them."""

    exit_code = exit_codes.CONFIG
    count: int
    seconds: float
    reason: str
    template = (
        "every task fails: want a complete group, got {count} tasks in a row that failed for good in {seconds:.0f} s "
        "(learner.failing_tasks, learner.failing_s); the last: {reason}; mend that and go on with --resume "
        "(tidemill dead lists the tasks, and requeues their prompts)"
    )


class NoProgress(DetailedError, LearnerError):
    """A wait has reached its deadline."""

    where: str
    waited_s: float
    waits_for: str
    template = "{where}: no progress in {waited_s:.0f} s; waits for: {waits_for}"


class FeedError(WrongContent):
    """A violation of the protocol of feeder and ranks: an unknown message, a wrong frame, an unexpected step."""

    template = "{where}: want {want}, got {got!r}"


class FeederLost(DetailedError, LearnerError):
    """No message has come from the feeder for too long."""

    url: str
    waited_s: float
    asked_for: str
    last_reason: str

    def __str__(self) -> str:
        last = f"; it was waiting for: {self.last_reason}" if self.last_reason else "; it has never answered"
        return f"feeder at {self.url}: no message for {self.waited_s:.1f} s, requested {self.asked_for}{last}"


class FeederFailed(DetailedError, LearnerError):
    """The feeder ended with an error, which came over the feed with the exit code of its process."""

    url: str
    reason: str
    exit_code: int = exit_codes.CRASHED
    template = "feeder at {url}: {reason}"


class RanksLeft(DetailedError, LearnerError):
    """All ranks have left before the last step: a rank was drained, and the learner was not."""

    step: int
    template = "a rank was drained by a signal of another program, and all ranks have left before step {step}"


class RankFailed(DetailedError, LearnerError):
    """A rank ended with an error, which came over the feed with the exit code of its process."""

    rank: int
    reason: str
    exit_code: int = exit_codes.CRASHED
    template = "rank {rank}: {reason}"


class RankSilent(DetailedError, LearnerError):
    """A rank on another node has sent no heartbeat for too long: it hangs, or its machine or network is gone."""

    rank: int
    silent_s: float
    template = "rank {rank}: no heartbeat for {silent_s:.0f} s"


class MemoryReleased(DetailedError, LearnerError):
    """The model was used while its memory was released, which is a bug of the learner."""

    what: str
    template = "{what}: want the learner's memory resumed first, got it released to the engines"


class AlarmStop(DetailedError, LearnerError):
    """A diagnostic was at error level for ``alarms.patience`` steps with ``alarms.action: stop``, or no step trains."""

    exit_code = exit_codes.CONFIG
    step: int
    alarm: str
    template = "step {step}: {alarm} (learner.algorithm.alarms: its weights are not published)"


class NodeRefused(WrongContent, ValueError):
    """A node, or the nodes together, cannot run this learner; no restart cures it."""

    exit_code = exit_codes.CONFIG
    cure: str
    template = "{where}: want {want}, got {got}; cure: {cure}"


class NodeReplaced(DetailedError, LearnerError):
    """Another agent has taken this node rank, after this one had been silent for too long."""

    exit_code = exit_codes.TAKEN_OVER
    node: int
    by: str
    template = "node {node}: another agent has this node rank now: {by}"


class LearnerEnded(DetailedError, LearnerError):
    """The learner was given up: nodes are missing, it failed too often, or no restart cures the failure."""

    reason: str
    exit_code: int = exit_codes.CRASHED
    template = "{reason}"
