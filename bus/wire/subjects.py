"""Names on the bus: streams, shards, buckets, consumers, subjects, headers, ids. The only place that spells them.

A task's id chooses the shard of SAMPLES, and one number names a message of any of them: with K shards, message q of
shard s has the sequence q * K + s, so that the remainder of a sample's sequence is its task's. With one shard, it is
JetStream's own sequence. A *position* has one sequence for each shard.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.bus.wire.messages import Kind
from tidemill.bus.wire.task_settings import RUN_NAME

TASKS, SAMPLES, PLAN, PARTIALS, TURNS, DEAD = "TASKS", "SAMPLES", "PLAN", "PARTIALS", "TURNS", "DEAD"
TRAINED = "TRAINED"
BUCKETS = ("weights", "run", "live", "wanted", "keys")
SECRET_BUCKETS = ("keys",)
CONSUMERS = {Kind.TRAIN: "rollout", Kind.EVAL: "eval"}

EPOCH_KEY = "epoch"  # Row of the bucket ``run``: ``{"epoch": n}``
FLOOR_KEY = "task_floor"  # Row of the bucket ``run``: ``{"floor": n}``, all tasks with ids up to n are settled
END_KEY = "end"  # Row of the bucket ``run``: the end of the run, ``tidemill.bus.wire.rows.EndRow``
NODE_KEY = "node"  # Rows ``node.<R>`` of the bucket ``run``: ``tidemill.bus.wire.rows.NodeRow``
HISTORY_KEY = "history"  # Row of the bucket ``run``: ``tidemill.bus.wire.rows.HistoryRow``
BEST_KEY = "best"  # Row of the bucket ``run``: the best version by ``eval.best`` that has a checkpoint
# Rows ``settings.<epoch>`` of the bucket ``run``: ``tidemill.learner.settings.step_settings``
SETTINGS_KEY = "settings"
# Row of the bucket ``wanted`` with the autoscaler that decides: of three parts, so that its renewals wake no host
AUTOSCALE_KEY = "autoscale.of.all"
REFUSED_KEY = "refused"  # Rows ``refused.<actor>`` of the bucket ``run``: ``tidemill.learner.buffer.failures.Refusal``

MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_ID = "Nats-Expected-Last-Msg-Id"
EXPECTED_LAST_ON_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
EPOCH_HEADER = "Tm-Epoch"

_LIMIT = 2**63  # Sequences are signed 64-bit numbers in the columns of plans
_MAX_DIGITS = 19  # Digits of 2**63. A longer text is not converted: that takes quadratic time.
_ACK_TOKENS = 9  # Tokens of an acknowledgement subject without a JetStream domain
_LONGEST_NAME = 64
_NOT_TOKEN = re.compile(r"[^A-Za-z0-9_-]")
_NAME = re.compile(r"_SAMPLES(?:-0of(\d{1,2}))?$")


def check_run(run: str) -> str:
    """Return the run id. Raises ValueError when it cannot be part of a subject and of a stream name."""
    if not RUN_NAME.fullmatch(run):
        raise ValueError(f"run: want 1 to 64 of A-Z a-z 0-9 _ -, got {run!r}")
    return run


def token(text: str) -> str:
    return _NOT_TOKEN.sub("_", text) or "_"


def inbox_prefix(user: str) -> str:
    """Return the prefix of the reply subjects of a user; the server lets no other user subscribe to them."""
    return f"_INBOX_{token(user)}" if user else "_INBOX"


def stream(run: str, name: str) -> str:
    """Return the name of a stream of a run; ``name`` is the short one, such as TASKS."""
    return f"TM_{run}_{name}"


def bucket_stream(run: str, bucket: str) -> str:
    return f"KV_TM_{run}_{bucket}"


def row(run: str, bucket: str, key: str) -> str:
    return f"$KV.TM_{run}_{bucket}.{key}"


def task(run: str, kind: str, rollout: str = "") -> str:
    """Return the subject of a task, its rollout's own where it has one. ``kind``: train, eval, or fence."""
    return f"tm.{run}.task.{kind}-{rollout}" if rollout else f"tm.{run}.task.{kind}"


def consumer(kind: Kind, rollout: str = "") -> str:
    return f"{CONSUMERS[kind]}-{rollout}" if rollout else CONSUMERS[kind]


def queues(rollouts: Sequence[str]) -> dict[tuple[Kind, str], str]:
    """Return the durable consumers of TASKS by kind and rollout; the empty rollout has single turns."""
    plain = {(kind, ""): name for kind, name in CONSUMERS.items()}
    return plain | {(kind, rollout): consumer(kind, rollout) for rollout in rollouts for kind in Kind}


def trains(subject: str) -> bool:
    """Return whether a subject of TASKS belongs to training tasks, of any rollout."""
    kind = subject.split(".")[3]
    return kind == Kind.TRAIN or kind.startswith(f"{Kind.TRAIN}-")


def rollout_of(subject: str) -> str:
    """Return the rollout that a subject of TASKS names; empty for single turns."""
    return subject.split(".")[3].partition("-")[2]


def plan(run: str, kind: str) -> str:
    """Return the subject of a record. ``kind``: plan, done, settle, requeue, fence, or evaluated."""
    return f"tm.{run}.plan.{kind}"


def sample(run: str, kind: str, version: int, actor: str, shard: str = "") -> str:
    """Return the subject of a sample. ``version``: the oldest of its tokens; -1 for an empty response.

    ``shard``: suffix of its shard (``Shards``), here and below; empty = SAMPLES is one stream.
    """
    return f"tm.{run}.sample{shard}.{kind}.{version if version >= 0 else 'none'}.{token(actor)}"


def samples(run: str, *tokens: object, shard: str = "") -> str:
    """Return the filter of all samples, or of those with subjects that continue with these tokens (kind, version)."""
    return ".".join(("tm", run, f"sample{shard}", *map(str, tokens), ">"))


def samples_of(run: str, actor: str, shard: str = "") -> str:
    """Return the filter of all samples of an actor (a token already, or ``*``), except their manifests."""
    return f"tm.{run}.sample{shard}.*.*.{actor}"


def in_shard(subject: str, shard: str) -> str:
    """Return the subject of a sample, from its subject in a run whose SAMPLES is one stream."""
    tokens = subject.split(".", 3)
    return ".".join((*tokens[:2], f"sample{shard}", tokens[3]))


def manifest(sample: str) -> str:
    """Return the subject of the manifest of a sample that is stored in parts, from the sample's own."""
    return f"{sample}.parts"


def sample_in(run: str, subject: str) -> str:
    """Return the subject of a sample, or of its manifest, as the whole sample has it in another run (one stream)."""
    tokens = subject.split(".")
    return ".".join((tokens[0], run, "sample", *tokens[3:6]))


def is_sample(run: str, subject: str) -> bool:
    """Return whether a subject of SAMPLES belongs to a sample or its manifest, and not to a part."""
    tokens = subject.split(".", 3)
    return tokens[:2] == ["tm", run] and tokens[2:3] != [] and tokens[2].partition("-")[0] == "sample"


def kind_of_sample(subject: str) -> str:
    """Return the kind in the subject of a sample: train or eval."""
    return subject.split(".")[3]


def version_of_sample(subject: str) -> int | None:
    """Return the version that a subject of SAMPLES names; None when it names none."""
    tokens = subject.split(".", 5)
    return natural(tokens[4]) if len(tokens) > 4 else None


def refused(actor: str) -> str:
    """Return the key of the row of a refused actor."""
    return f"{REFUSED_KEY}.{token(actor)[:_LONGEST_NAME]}"


def actor_of_sample(subject: str) -> str:
    """Return the actor (on a bus with users, the user that stored the message) in a subject, fit to be shown."""
    tokens = subject.split(".", 6)
    return token(tokens[5])[:_LONGEST_NAME] if len(tokens) > 5 else "_"


def acks(run: str, rollouts: Sequence[str] = ()) -> list[str]:
    """Return the subjects of acknowledgements of training tasks, without a JetStream domain and with one."""
    names = [name for (kind, _), name in queues(rollouts).items() if kind is Kind.TRAIN]
    tasks = stream(run, TASKS)
    return [subject for name in names for subject in (f"$JS.ACK.{tasks}.{name}.>", f"$JS.ACK.*.*.{tasks}.{name}.>")]


def part(run: str, kind: str, task: int | str, shard: str = "") -> str:
    """Return the subject of parts of a sample too large for one message."""
    return f"tm.{run}.part{shard}.{kind}.{task}"


def parts(run: str, shard: str = "") -> str:
    """Return the filter of all parts of all samples."""
    return f"tm.{run}.part{shard}.>"


def partial(run: str, task: int | str = "*", index: int | str = "*") -> str:
    """Return the subject of a partial, or the filter of many: by default of all of them."""
    return f"tm.{run}.partial.{task}.{index}"


def turn(run: str, task: int | str = "*", index: int | str = "*") -> str:
    """Return the subject of the log of an episode, or the filter of many: by default of all of them."""
    return f"tm.{run}.turn.{task}.{index}"


def trained(run: str, step: int | str = "*", rank: int | str = "*") -> str:
    """Return the subject of the values of a step's tokens on a data-parallel rank, or the filter of many."""
    return f"tm.{run}.trained.{step}.{rank}"


def task_named(subject: str) -> int | None:
    """Return the id of the task that a subject of PARTIALS, TURNS or DEAD names; None when it names none, also for
    another spelling than a process of the run publishes (``007``).
    """
    parts = subject.split(".")
    spelled = parts[4 if parts[2] == "dead" else 3]
    task = natural(spelled)
    return task if str(task) == spelled else None


def is_literal(subject: str) -> bool:
    """Return whether a subject names itself alone as a filter, too."""
    return not {"*", ">"} & set(subject.split("."))


def natural(text: str) -> int | None:
    """Return the number that a token or header spells, 0 to 2**63 - 1; None for any other text."""
    if len(text) > _MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    return number if number < _LIMIT else None


class Delivery(NamedTuple):
    """Numbers of a message in the acknowledgement subject that the server gave it."""

    deliveries: int
    seq: int
    consumer_seq: int
    stored_ns: int
    pending: int


def delivery(reply: str) -> Delivery | None:
    """Return the numbers in the reply subject of a message that a consumer delivered; None for any other subject."""
    fields = reply.split(".")
    if fields[:2] != ["$JS", "ACK"] or len(fields) < _ACK_TOKENS:
        return None
    numbers = fields[4:9] if len(fields) == _ACK_TOKENS else fields[6:11]  # with a domain there are two more
    digits = "".join(numbers)
    if not (digits.isascii() and digits.isdigit()):
        return None
    try:
        parsed = Delivery(*map(int, numbers))
    except (ValueError, TypeError):  # an empty text, or one of thousands of digits; fewer than five
        return None
    return parsed if max(parsed) < _LIMIT else None


def dead(run: str, kind: str = "", task: int | str = "*") -> str:
    """Return the subject of a record of DEAD, or the filter of many. ``kind``: task, report or word; empty = all."""
    return f"tm.{run}.dead.{kind}.{task}" if kind else f"tm.{run}.dead.>"


def metric(run: str, source: str = ">") -> str:
    """Return the subject of live metrics of one process, or of all; core messages, in no stream."""
    return f"tm.{run}.metric.{source}"


def full(run: str) -> str:
    """Return the subject of requests for the reason for which the bus stores nothing; else no process answers."""
    return f"tm.{run}.full"


def everything(run: str) -> str:
    """Return the filter of every subject of the run, except its rows."""
    return f"tm.{run}.>"


def nonce() -> str:
    """Return 12 hexadecimal digits: 48 bits from the operating system."""
    return secrets.token_hex(6)


Position = tuple[int, ...]
"""A sequence for each shard, in the order of the shards; one is enough for sequences below all messages."""


def is_behind(seq: int, position: Position) -> bool:
    """Return whether a message is at or before a position."""
    return seq <= position[seq % len(position)]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a run: their number, names and sequences."""

    count: int = 1

    @classmethod
    def named(cls, streams: Iterable[str]) -> "Shards | None":
        """Return the shards among the names of a run's streams; None = there are none yet."""
        counts = [int(match[1] or 1) for name in streams if (match := _NAME.search(name))]
        return cls(counts[0]) if counts else None

    def suffix(self, shard: int) -> str:
        """Return the end of a shard's name, which stands in its subjects too; empty where there is one shard."""
        return "" if self.count == 1 else f"-{shard}of{self.count}"

    def stream(self, run: str, shard: int) -> str:
        """Return the name of a shard's stream."""
        return stream(run, SAMPLES + self.suffix(shard))

    def of_task(self, task: int) -> int:
        """Return the shard of the samples of a task."""
        return task % self.count

    def seq(self, shard: int, local: int) -> int:
        """Return the sequence of a message, from its sequence in its shard's stream."""
        return local * self.count + shard

    def place(self, seq: int) -> tuple[int, int]:
        """Return the shard of a message, and its sequence there."""
        return seq % self.count, seq // self.count

    def first(self, shard: int, seq: int) -> int:
        """Return the first sequence in a shard's stream of messages from ``seq`` on."""
        return -((shard - seq) // self.count)
