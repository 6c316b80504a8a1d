"""What the feeder's decisions cost for each sample, without a bus: real entries of readers, made and sent beforehand.

python -m tests.bench decisions [--groups 64] [--steps 20] [--tokens 3500]

Groups of eight samples are indexed and encoded as readers send them. Measured is CPU time from their bytes on: decoded,
added to the DataSource, planned, applied, and made into the messages of eight ranks, which fetch the tokens themselves.
"""

import argparse
import time
from collections import Counter
from dataclasses import replace

import msgspec

from tests.bench.sample_path import make_sample
from tests.data_kit import rules, task
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Plan, Span
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.sample_index import SampleIndex, context_of, index_of
from tidemill.learner.feed.data_metrics import episode_metrics, facts_of
from tidemill.learner.feed.feed_messages import step_frames
from tidemill.learner.feed.shard_reader import FROM_READER, Rows

GROUP_SIZE, NUM_RANKS, IN_A_MESSAGE = 8, 8, 64


class Clock:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.spent_s, self._last_s = Counter[str](), time.process_time()

    def lap(self, stage: str) -> None:
        """Count the time since the last lap for a stage."""
        now_s = time.process_time()
        self.spent_s[stage] += now_s - self._last_s
        self._last_s = now_s


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench decisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", type=int, default=64, help="groups of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=3500, help="of a response")
    args = parser.parse_args(arguments)
    source = DataSource(
        rules(
            steps=args.steps + 1,
            max_lag=args.steps,
            groups_per_step=args.groups,
            data_parallel=NUM_RANKS,
            max_tokens_per_micro_batch=8 * (args.tokens + 100),
        ),
        epoch=1,
    )
    num_samples = args.steps * args.groups * GROUP_SIZE
    report(decide(source, args), num_samples, decode_whole(args.tokens, num_samples))


def decide(source: DataSource, args: argparse.Namespace) -> Clock:
    """Take all steps, and return the CPU seconds of each stage."""
    source.published(0, 0)
    clock = Clock()
    pattern = make_sample(source.rules.run, 1, args.tokens)
    for step in range(1, args.steps + 1):
        messages = issued_and_answered(source, pattern, step, args)
        clock.lap("not counted")
        rows = [FROM_READER.decode(message) for message in messages]
        clock.lap("decode")
        for message in rows:
            assert isinstance(message, Rows)
            for entry in message.entries:
                assert isinstance(entry, SampleIndex)
                source.unread_versions(entry)
                source.add(entry, 0.0)
        clock.lap("add")
        plan = source.plan(0.0)
        assert isinstance(plan, Plan), type(plan)
        clock.lap("plan")
        samples = source.samples(plan)
        source.apply(plan, step)
        source.take_settled()
        clock.lap("apply")
        columns, _ = step_frames(plan, samples, {}, ports=[1, 2], pad_to=1, routed=None)
        clock.lap("columns and shares")
        assert facts_of(plan, samples, columns) | episode_metrics(samples, plan)
        clock.lap("metrics")
        source.snapshot()
        clock.lap("snapshot")
    return clock


def decode_whole(num_tokens: int, num_samples: int) -> float:
    """Decode and check so many whole samples, as a reader does for each index. Returns the CPU seconds."""
    data = encode_sample(make_sample("run", 1, num_tokens))
    clock = Clock()
    for _ in range(num_samples):
        check_sample(decode_sample(data), vocab_size=150_000)
    clock.lap("whole")
    return clock.spent_s["whole"]


def report(clock: Clock, num_samples: int, whole_s: float) -> None:
    counted = {stage: 1e6 * spent / num_samples for stage, spent in clock.spent_s.items() if stage != "not counted"}
    for stage, cost_us in counted.items():
        print(f"  {stage:<20} {cost_us:5.1f} us a sample")
    print(f"  {'all decisions':<20} {sum(counted.values()):5.1f} us a sample")
    print(f"  {'the whole sample':<20} {1e6 * whole_s / num_samples:5.1f} us a sample, decoded and checked by a reader")
    print(f"RATIO decisions / samples decoded and checked: {sum(counted.values()) * num_samples / 1e6 / whole_s:.2f}")


def issued_and_answered(source: DataSource, pattern: object, step: int, args: argparse.Namespace) -> list[bytes]:
    """Issue the tasks of a step, and return what readers send of their samples."""
    entries: list[SampleIndex] = []
    for number in range(args.groups):
        issued = replace(task((step - 1) * args.groups + number + 1, group_size=GROUP_SIZE), min_version=0)
        source.issued(issued, 0.0)
        for index in range(GROUP_SIZE):
            seq = len(entries) + 1 + (step - 1) * args.groups * GROUP_SIZE
            sample = replace(
                pattern,  # type: ignore[type-var]
                task=issued.id,
                index=index,
                group_size=GROUP_SIZE,
                prompt=issued.prompt,
                sampling=issued.sampling,
                reward=float(index),
                spans=(Span(version=0, num_tokens=args.tokens),),
            )
            entry = index_of(seq, sample, "actor")  # type: ignore[arg-type]
            entry.context, entry.sample = context_of(issued.prompt_tokens), None
            entries.append(entry)
    return [
        msgspec.msgpack.encode(Rows(0, 0, entries[start : start + IN_A_MESSAGE]))
        for start in range(0, len(entries), IN_A_MESSAGE)
    ]


if __name__ == "__main__":
    main()
