"""``tidemill show``: one sample, token by token, with probabilities and versions, and its disposition."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Sample
from tidemill.bus.wire.trained_values import TrainedValues
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.samples.filters import Filter, prompt_text, task_of
from tidemill.launch.samples.search import FoundSample, SampleHistory, SampleSearch, as_map, history_of, opened
from tidemill.launch.samples.text import (
    Vocabulary,
    conversation,
    facts,
    plain,
    plain_table,
    to_json,
    turns_table,
)

# (lowest probability, style) of a token, in descending order.
_SHADES = (
    *((0.9, ""), (0.5, "black on green"), (0.1, "black on yellow")),
    *((0.01, "white on magenta"), (0.0, "white on red")),
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sample", metavar="SAMPLE", help="a sequence (#123 or 123) or TASK.INDEX (57.3)")
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--table", action="store_true", help="add a row for each token")
    parser.add_argument("--tokenizer", default="", metavar="DIRECTORY", help="if it is not the model's")


def run(args: argparse.Namespace) -> int:
    """Print one sample with its tokens. Returns 0. Raises ValueError when it is missing or unreadable."""
    return look(args, show_sample)


@dataclass(frozen=True, slots=True)
class TrainedToken:
    """Values of a token in the step that trained it."""

    logprob: float
    entropy: float
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a response."""

    id: int
    text: str
    logprob: float  # Log-prob in nats, under the distribution it was sampled from; 0 if it was not sampled
    version: int
    span: int  # Number of its span, from 0
    sampled: bool  # False if the environment inserted it (`loss_mask` 0)
    sequence: int = 0  # Number of its token sequence, from 0
    trained: "TrainedToken | None" = None  # None if it was not trained, or its values are not recorded

    @property
    def probability(self) -> float:
        """Probability under the distribution it was sampled from; 1 if it was not sampled."""
        return math.exp(self.logprob)


async def show_sample(bus: Bus, args: argparse.Namespace) -> int:
    """Print one sample and return 0. Raises ValueError when there is none of this name, or it cannot be read."""
    match, duplicates = await _find(bus, args.sample)
    sample = match.sample
    if isinstance(sample, WireError):
        raise ValueError(f"sample {args.sample}: #{match.line.seq} cannot be read: {sample}")
    history = await history_of(bus, match.line.seq, sample)
    values = (
        await bus.trained.of_sample(history.step, match.line.seq, history.rank) if history.state == "trained" else None
    )
    tokens = tokens_of(sample, await _vocabulary(bus, args), values)
    if args.json:
        print(to_json(_json(match, sample, tokens, history, duplicates)))
    else:
        _print_sample(
            Console(highlight=False, soft_wrap=True), match, sample, tokens, history, duplicates, table=args.table
        )
    return 0


def tokens_of(sample: Sample, vocabulary: Vocabulary, values: TrainedValues | None = None) -> list[Token]:
    """Return the response token by token. ``values``: of its trained tokens, if they are recorded."""
    ids: list[int] = []
    sequences: list[int] = []
    right = 0
    for number, size in enumerate(sample.sizes):
        right += size.num_tokens
        # Sizes of an invalid sample may be anything.
        ids += sample.tokens[max(0, right - size.response_length) : max(0, right)].tolist()
        sequences += [number] * (len(ids) - len(sequences))
    spans: list[tuple[int, int]] = []
    for number, span in enumerate(sample.spans):
        spans += [(number, span.version)] * min(span.num_tokens, len(ids))
    spans += [(len(sample.spans), -1)] * (len(ids) - len(spans))  # the spans of an invalid sample may not cover it
    trained = _trained_tokens(values)
    columns = zip(
        ids, vocabulary.pieces(ids), sample.rollout_log_probs, spans, sample.loss_mask, sequences, strict=False
    )
    return [
        Token(id, text, float(logprob), version, span, bool(sampled), sequence, trained.get(place))
        for place, (id, text, logprob, (span, version), sampled, sequence) in enumerate(columns)
    ]


def _trained_tokens(values: TrainedValues | None) -> dict[int, TrainedToken]:
    if values is None:
        return {}
    columns = (values.log_probs, values.entropies, values.advantages, values.weights)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {place: TrainedToken(*row) for place, row in zip(values.places.tolist(), rows, strict=True)}


async def _find(bus: Bus, name: str) -> tuple[FoundSample, list[int]]:
    """Return the sample of ``#sequence`` or ``task.index``, and sequences of others of its place. Raises ValueError."""
    if "." not in name:
        return await _by_sequence(bus, name), []
    task, index = task_of("SAMPLE", name)
    search = SampleSearch(bus, Filter(task=task, index=index))
    first, last = await search.history.at_task(task), (await search.history.state()).last_seq
    places = [match async for match in search.forward(first, last)]
    if not places:
        raise ValueError(f"sample {name}: want one that is in the stream, found none from sequence {first} on")
    return places[0], [match.line.seq for match in places[1:]]


async def _by_sequence(bus: Bus, name: str) -> FoundSample:
    word = name.removeprefix("#")
    if not word.isdecimal() or not int(word):
        raise ValueError(f"SAMPLE: want a sequence (#123) or TASK.INDEX (57.3), got {name!r}")
    search = SampleSearch(bus, Filter())
    try:
        stored = await search.history.payload(int(word))
    except NotFound:
        state = await search.history.state()
        raise ValueError(f"sample {name}: want one of the sequences {state.first_seq} to {state.last_seq}") from None
    return await search.found(stored, opened(stored))


async def _vocabulary(bus: Bus, args: argparse.Namespace) -> Vocabulary:
    row, _ = await bus.rows("run").read("config")
    path = row.get("model", {}).get("path", "") if row is not None else ""
    places = [args.tokenizer] if args.tokenizer else [path, str(Path(args.run_dir) / "model") if args.run_dir else ""]
    return Vocabulary.read([Path(place) for place in places if place])


def _json(
    match: FoundSample, sample: Sample, tokens: Sequence[Token], history: SampleHistory, duplicates: list[int]
) -> dict[str, object]:
    names = ["id", "text", "logprob", "probability", "version", "sampled"]
    names += ["sequence"] if len(sample.sequences) > 1 else []
    return {
        **as_map(match.line.seq, sample),
        "lag": match.line.lag,
        "stored_s": match.line.stored_s,
        "token_table": [{name: getattr(token, name) for name in names} | _trained_json(token) for token in tokens],
        "fate": history.as_map(),
        "others": duplicates,
    }


def _trained_json(token: Token) -> dict[str, float | None]:
    names = {"train_logprob": "logprob", "train_entropy": "entropy", "advantage": "advantage", "weight": "weight"}
    return {name: None if token.trained is None else getattr(token.trained, field) for name, field in names.items()}


def _print_sample(
    console: Console,
    match: FoundSample,
    sample: Sample,
    tokens: Sequence[Token],
    history: SampleHistory,
    duplicates: list[int],
    *,
    table: bool,
) -> None:
    console.print(facts(match.line, sample))
    times, sampling = sample.timings, sample.sampling
    console.print(f"outcome   {plain(str(history))}", style="bold", markup=False)
    spent = f"generated in {times.generating_s:.3f} s, tools {times.tools_s:.3f} s, reward {times.reward_s:.3f} s"
    if history.state == "trained":
        console.print(f"trained   {_values_text(tokens)}")
    console.print(f"timings   queued {times.queued_s:.3f} s, {spent}")
    drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    console.print(f"sampling  {drawn}, at most {sampling.max_new_tokens} tokens, seed {sampling.seed}")
    made_by = f"{plain(sample.actor) or '?'} with {plain(sample.engine) or '?'}, attempt {plain(sample.attempt)}"
    console.print(f"made by   {made_by}", markup=False)
    if sample.label is not None:
        console.print(Text(f"label     {plain(str(sample.label))}"))
    if sample.metadata:
        console.print(Text(f"metadata  {plain(to_json(sample.metadata))}"))
    if duplicates:
        console.print(f"others    of the same place: {', '.join(f'#{seq}' for seq in duplicates)}")
    if sample.turns is not None:
        console.print(turns_table(sample.turns))
    prompt = Text(plain(prompt_text(sample)), style="dim")
    console.print(conversation(sample.transcript) if sample.transcript else prompt)
    console.print(shaded(tokens))
    console.print(_legend(sample, tokens))
    if table:
        console.print(_table(tokens))


def _values_text(tokens: Sequence[Token]) -> str:
    """Return a summary of the values of trained tokens."""
    pairs = [(token, token.trained) for token in tokens if token.trained is not None]
    if not pairs:
        return "values of its tokens not recorded (learner.record), or not computed: advantages of 0 have no gradient"
    difference = sum(abs(trained.logprob - token.logprob) for token, trained in pairs) / len(pairs)
    advantages, weights = ([getattr(trained, name) for _, trained in pairs] for name in ("advantage", "weight"))
    return (
        f"{len(pairs)} tokens, mean |log-prob difference| {difference:.4g}, "
        f"advantage {_range(advantages)}, weight {_range(weights)}"
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def shaded(tokens: Sequence[Token]) -> Text:
    """Return the response with a background for each token's probability; every second span is underlined."""
    text = Text()
    for place, token in enumerate(tokens):
        if place and token.sequence != tokens[place - 1].sequence:
            text.append(f"\n──── sequence {token.sequence + 1} ────\n", style="dim")
        if tokens[-1].span and (place == 0 or token.span != tokens[place - 1].span):
            text.append(f"⟨v{token.version}⟩", style="bold blue")
        style = shade(token.probability) if token.sampled else "dim italic"
        text.append(plain(token.text).replace("\n", "⏎\n"), style=f"{style} underline" if token.span % 2 else style)
    return text


def shade(probability: float) -> str:
    """Return the style of a token sampled with this probability."""
    return next(style for low, style in _SHADES if probability >= low)


def _legend(sample: Sample, tokens: Sequence[Token]) -> Text:
    text = Text("\nprobability ")
    for low, style in _SHADES:
        text.append(f" ≥ {low:g} " if low else " less ", style=style)
    spans = ", ".join(f"v{span.version}: {span.num_tokens} tokens" for span in sample.spans)
    text.append(f"  versions {spans}", style="dim")
    text.append(" (every second one underlined)" if len(sample.spans) > 1 else "", style="dim")
    sampled = [token.logprob for token in tokens if token.sampled]
    if sampled:
        mean = sum(sampled) / len(sampled)
        least = f"least probable token {math.exp(min(sampled)):.3g}"
        text.append(f"\nmean log-prob {mean:.3f} (perplexity {math.exp(-mean):.3f}), {least}")
    return text


def _table(tokens: Sequence[Token]) -> Table:
    """Return a row for each token; columns of the values in training only where some are recorded."""
    numbers = ["place", "id", "probability", "log-prob", "version"]
    trained = ["trained", "difference", "advantage", "weight"] if any(token.trained for token in tokens) else []
    columns = ["place", "id", "token", "probability", "log-prob", "version", *trained]
    table = plain_table(*columns, right=[*numbers, *trained])
    for place, token in enumerate(tokens):
        odds = (f"{token.probability:.4f}", f"{token.logprob:.4f}") if token.sampled else ("not sampled", "")
        text = Text(repr(token.text), style=shade(token.probability))
        values = [""] * len(trained)
        if (step := token.trained) is not None:
            difference = step.logprob - token.logprob
            values = [f"{step.logprob:.4f}", f"{difference:+.4f}", f"{step.advantage:.4g}", f"{step.weight:.4g}"]
        table.add_row(str(place), str(token.id), text, *odds, f"v{token.version}", *values)
    return table
