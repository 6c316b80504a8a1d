"""The error tree of the learner."""

from collections.abc import Mapping

from tidemill.bus import exit_codes

NEW_RUN = (
    "begin a new run with the model of a checkpoint (tidemill up CONFIG --from-checkpoint CHECKPOINT --set "
    "directory=NEW)"
)


class LearnerError(Exception):
    """Base class of the learner's errors."""


class ConfigRefused(LearnerError, ValueError):
    """Settings contradict each other, or the records of an earlier start of this run."""

    exit_code = exit_codes.CONFIG

    def __init__(self, field: str, want: str, got: object) -> None:
        super().__init__(field, want, got)
        self.field, self.want, self.got = field, want, got

    def __str__(self) -> str:
        return f"{self.field}: want {self.want}, got {self.got!r}"


class PromptError(LearnerError, ValueError):
    """A prompt file, or one of its rows, cannot be used."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: str, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class CannotRender(LearnerError, ValueError):
    """The tokenizer or the chat template rejects a row."""


class TextTooLong(LearnerError, ValueError):
    """A text is too long for a number of tokens, by its length alone."""

    def __init__(self, max_tokens: int, num_bytes: int) -> None:
        super().__init__(max_tokens, num_bytes)
        self.max_tokens, self.num_bytes = max_tokens, num_bytes

    def __str__(self) -> str:
        return f"want a text of at most {self.max_tokens} tokens, got one of {self.num_bytes} bytes"


class TemplateLacks(LearnerError, ValueError):
    """The model has no chat template, or one that leaves out what rows have: no cause that is a row's own."""


class DebugFileRefused(LearnerError, ValueError):
    """A file of recorded samples, or a dump of a step, is missing or cannot be read."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: str, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class ReplayMismatch(LearnerError):
    """The streams do not continue the checkpoint: training from it would not repeat the recorded steps."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: object, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class HookFailed(LearnerError):
    """A hook of the user has raised an error, which ends the rank."""

    def __init__(self, setting: str, path: str, step: int, reason: str) -> None:
        super().__init__(setting, path, step, reason)
        self.setting, self.path, self.step, self.reason = setting, path, step, reason

    def __str__(self) -> str:
        return f"{self.setting}: {self.path} failed at step {self.step}: {self.reason}"


class CheckpointCorrupt(LearnerError):
    """A file of a checkpoint is missing, or its size or digest differs from the manifest."""

    def __init__(self, directory: str, file: str, want: object, got: object) -> None:
        super().__init__(directory, file, want, got)
        self.directory, self.file, self.want, self.got = directory, file, want, got

    def __str__(self) -> str:
        return f"{self.directory}/{self.file}: want {self.want}, got {self.got}"


class StoreFailed(LearnerError):
    """The store of checkpoints cannot be reached now, or refuses a request."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class CheckpointUnwritten(LearnerError):
    """A checkpoint cannot be written, as on a full disk. The next start loads the one before it."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return f"{self.directory}: cannot be written: {self.reason}"


class NoCheckpoint(LearnerError):
    """The run has a checkpoint according to its row on the bus, but none of those on disk can be used."""

    exit_code = exit_codes.CONFIG

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return (
            f"{self.directory}: no usable checkpoint: {self.reason}; put a whole copy of one back there, "
            "or throw the run away (tidemill up CONFIG --fresh)"
        )


class RunLost(LearnerError):
    """Checkpoints exist, but the bus has no record of their run: its position in the data is lost."""

    exit_code = exit_codes.CONFIG

    def __init__(self, run: str, newest: str) -> None:
        super().__init__(run, newest)
        self.run, self.newest = run, newest

    def __str__(self) -> str:
        onward = NEW_RUN.replace("CHECKPOINT", self.newest)
        return (
            f"{self.newest}: want the bus's records of run {self.run} up to this checkpoint, got a bus with "
            "no row run/checkpoint "
            f"and no plan of it: its store was emptied, or it is another bus. Put the bus's store back; or {onward}; "
            "or throw the checkpoints away (tidemill up CONFIG --fresh)"
        )


class NothingTrained(LearnerError):
    """All prompts of the run's passes are settled, and no group of them could be trained."""

    exit_code = exit_codes.CONFIG

    def __init__(self, num_epochs: int, dropped: Mapping[str, int], last_failure: str = "") -> None:
        super().__init__(num_epochs, dropped, last_failure)
        self.num_epochs, self.dropped, self.last_failure = num_epochs, dropped, last_failure

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"learner.num_epochs: want a group to train in {self.num_epochs} "
            f"pass{'es' * (self.num_epochs > 1)} over the prompts, "
            "got none (tasks: "
            f"{reasons or 'none'}{f'; the last that failed: {self.last_failure}' if self.last_failure else ''}); "
            "look at the data, the rewards and `tidemill dead`"
        )


class TasksFail(LearnerError):
    """Every task fails: so many in a row have died, without a complete group between them."""

    exit_code = exit_codes.CONFIG

    def __init__(self, count: int, seconds: float, reason: str) -> None:
        super().__init__(count, seconds, reason)
        self.count, self.seconds, self.reason = count, seconds, reason

    def __str__(self) -> str:
        return (
            f"every task fails: want a complete group, got {self.count} tasks in a row that failed for good "
            f"in {self.seconds:.0f} s "
            f"(learner.failing_tasks, learner.failing_s); the last: {self.reason}; mend that and go on with --resume "
            "(tidemill dead lists the tasks, and requeues their prompts)"
        )


class NoProgress(LearnerError):
    """A wait has reached its deadline."""

    def __init__(self, where: str, waited_s: float, waits_for: str) -> None:
        super().__init__(where, waited_s, waits_for)
        self.where, self.waited_s, self.waits_for = where, waited_s, waits_for

    def __str__(self) -> str:
        return f"{self.where}: no progress in {self.waited_s:.0f} s; waits for: {self.waits_for}"


class FeedError(LearnerError):
    """A violation of the protocol of feeder and ranks: an unknown message, a wrong frame, an unexpected step."""

    def __init__(self, where: str, want: str, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got!r}"


class FeederLost(LearnerError):
    """No message has come from the feeder for too long."""

    def __init__(self, url: str, waited_s: float, asked_for: str, last_reason: str) -> None:
        super().__init__(url, waited_s, asked_for, last_reason)
        self.url, self.waited_s, self.asked_for, self.last_reason = url, waited_s, asked_for, last_reason

    def __str__(self) -> str:
        last = f"; it was waiting for: {self.last_reason}" if self.last_reason else "; it has never answered"
        return f"feeder at {self.url}: no message for {self.waited_s:.1f} s, requested {self.asked_for}{last}"


class FeederFailed(LearnerError):
    """The feeder ended with an error, which came over the feed with the exit code of its process."""

    def __init__(self, url: str, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        super().__init__(url, reason, exit_code)
        self.url, self.reason, self.exit_code = url, reason, exit_code

    def __str__(self) -> str:
        return f"feeder at {self.url}: {self.reason}"


class RanksLeft(LearnerError):
    """All ranks have left before the last step: a rank was drained, and the learner was not."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"a rank was drained by a signal of another program, and all ranks have left before step {self.step}"


class RankFailed(LearnerError):
    """A rank ended with an error, which came over the feed with the exit code of its process."""

    def __init__(self, rank: int, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        super().__init__(rank, reason, exit_code)
        self.rank, self.reason, self.exit_code = rank, reason, exit_code

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class RankSilent(LearnerError):
    """A rank on another node has sent no heartbeat for too long: it hangs, or its machine or network is gone."""

    def __init__(self, rank: int, silent_s: float) -> None:
        super().__init__(rank, silent_s)
        self.rank, self.silent_s = rank, silent_s

    def __str__(self) -> str:
        return f"rank {self.rank}: no heartbeat for {self.silent_s:.0f} s"


class MemoryReleased(LearnerError):
    """The model was used while its memory was released, which is a bug of the learner."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}: want the learner's memory resumed first, got it released to the engines"


class AlarmStop(LearnerError):
    """A diagnostic has been at error level for ``alarms.patience`` steps, and ``alarms.action`` is stop, or no step
    trains anything.
    """

    exit_code = exit_codes.CONFIG

    def __init__(self, step: int, alarm: str) -> None:
        super().__init__(step, alarm)
        self.step, self.alarm = step, alarm

    def __str__(self) -> str:
        return f"step {self.step}: {self.alarm} (learner.algorithm.alarms: its weights are not published)"
