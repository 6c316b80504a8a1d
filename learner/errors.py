"""The error tree of the learner."""

from bus import exit_codes

NEW_RUN = "begin a new run with the model of a checkpoint (tidemill up CONFIG --from-checkpoint CHECKPOINT --set directory=NEW)"


class LearnerError(Exception):
    """Something went wrong in the learner."""


class ConfigRefused(LearnerError, ValueError):
    """Settings that cannot work together, or not with what an earlier start of this run has recorded."""

    exit_code = exit_codes.CONFIG

    def __init__(self, field: str, want: str, got: object) -> None:
        super().__init__(field, want, got)
        self.field, self.want, self.got = field, want, got

    def __str__(self) -> str:
        return f"{self.field}: want {self.want}, got {self.got!r}"


class PromptError(LearnerError, ValueError):
    """A prompt file, or a row of it, that cannot be used."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: str, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class ReplayMismatch(LearnerError):
    """What the streams hold does not continue the checkpoint: training on would not repeat what was recorded."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: object, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class CheckpointCorrupt(LearnerError):
    """A file of a checkpoint is missing, has another size or another digest than its manifest says."""

    def __init__(self, directory: str, file: str, want: object, got: object) -> None:
        super().__init__(directory, file, want, got)
        self.directory, self.file, self.want, self.got = directory, file, want, got

    def __str__(self) -> str:
        return f"{self.directory}/{self.file}: want {self.want}, got {self.got}"


class CheckpointUnwritten(LearnerError):
    """A checkpoint cannot be written: the disk is full, or refuses. The one before it is what the next start begins with."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return f"{self.directory}: cannot be written: {self.reason}"


class NoCheckpoint(LearnerError):
    """The run says that it has a checkpoint, and none of those on disk can be used."""

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
    """Checkpoints are there, and the bus knows nothing of their run: its place in the data is lost."""

    exit_code = exit_codes.CONFIG

    def __init__(self, run: str, newest: str) -> None:
        super().__init__(run, newest)
        self.run, self.newest = run, newest

    def __str__(self) -> str:
        onward = NEW_RUN.replace("CHECKPOINT", self.newest)
        return (
            f"{self.newest}: want what the bus has recorded of run {self.run} up to this checkpoint, got a bus with no row run/checkpoint "
            f"and no plan of it: its store was emptied, or it is another bus. Put the bus's store back; or {onward}; "
            "or throw the checkpoints away (tidemill up CONFIG --fresh)"
        )


class NoProgress(LearnerError):
    """A bounded wait has ended without what it was for."""

    def __init__(self, where: str, waited_s: float, waits_for: str) -> None:
        super().__init__(where, waited_s, waits_for)
        self.where, self.waited_s, self.waits_for = where, waited_s, waits_for

    def __str__(self) -> str:
        return f"{self.where}: no progress in {self.waited_s:.0f} s; waits for: {self.waits_for}"


class FeedError(LearnerError):
    """The conversation of feeder and ranks broke its rules: an unknown message, a wrong frame, an unexpected step."""

    def __init__(self, where: str, want: str, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got!r}"


class FeederLost(LearnerError):
    """The feeder has said nothing for too long."""

    def __init__(self, url: str, waited_s: float, asked_for: str, last_words: str) -> None:
        super().__init__(url, waited_s, asked_for, last_words)
        self.url, self.waited_s, self.asked_for, self.last_words = url, waited_s, asked_for, last_words

    def __str__(self) -> str:
        last = f"; its last words: {self.last_words}" if self.last_words else "; it never answered"
        return f"feeder at {self.url}: silent for {self.waited_s:.1f} s, asked for {self.asked_for}{last}"


class FeederFailed(LearnerError):
    """The feeder ended with an error, which came over the feed with the exit code of its process."""

    def __init__(self, url: str, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        super().__init__(url, reason, exit_code)
        self.url, self.reason, self.exit_code = url, reason, exit_code

    def __str__(self) -> str:
        return f"feeder at {self.url}: {self.reason}"


class RankFailed(LearnerError):
    """A rank ended with an error, which came over the feed with the exit code of its process."""

    def __init__(self, rank: int, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        super().__init__(rank, reason, exit_code)
        self.rank, self.reason, self.exit_code = rank, reason, exit_code

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


class MemoryReleased(LearnerError):
    """Something wanted the model while its memory was given up: a mistake of ours, and never trained with."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}: the learner's memory is released (engines have it); want it resumed first"


class AlarmStop(LearnerError):
    """A diagnostic has been at error level for too long, and the configuration says to stop then."""

    exit_code = exit_codes.CONFIG

    def __init__(self, step: int, alarm: str) -> None:
        super().__init__(step, alarm)
        self.step, self.alarm = step, alarm

    def __str__(self) -> str:
        return f"step {self.step}: {self.alarm} (learner.algorithm.alarms: its weights are not published)"
