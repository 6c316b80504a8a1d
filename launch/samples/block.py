"""A sample as a block of text for a terminal. Knows no bus."""

from rich.text import Text

from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Sample
from tidemill.launch.samples.filters import Headline, prompt_text
from tidemill.launch.samples.search import FoundSample, clock
from tidemill.launch.samples.text import conversation, plain, shortened

_PROMPT_SIZE, _RESPONSE_SIZE = (4, 320), (10, 900)
"""Lines and characters of a text that is shortened."""
_LABEL_SIZE = 40
_GOOD = 0.99
"""Lowest reward shown in green."""


def block(match: FoundSample, *, full: bool = False) -> Text:
    """Return a sample as text: facts, prompt, response. ``full``: nothing is shortened, messages for episodes."""
    line, sample = match.line, match.sample
    if isinstance(sample, WireError):
        return Text(f"#{line.seq} broken: {sample}\n", style="red")
    text = facts(line, sample)
    if error := sample.metadata.get("error"):
        text.append(f"  {plain(str(error))}", style="red")
    text.append("\n" if sample.label is None else f"  label {_one_line(str(sample.label))}\n", style="dim")
    if full and sample.transcript:
        return text.append_text(conversation(sample.transcript))
    for body, size, style in ((prompt_text(sample), _PROMPT_SIZE, "dim"), (sample.response, _RESPONSE_SIZE, "")):
        for row in (body if full else shortened(body, *size)).splitlines() or [""]:
            text.append("  │ " if style else "  ┃ ", style="dim" if style else "cyan")
            text.append(f"{plain(row)}\n", style=style)
    return text


def facts(line: Headline, sample: Sample) -> Text:
    """Return origin, versions, reward, length and status of a sample in one line."""
    text = Text()
    text.append(f"#{line.seq} ", style="bold")
    text.append(f"{clock(line.stored_s)}  ", style="dim")
    text.append(f"task {sample.task}.{sample.index}", style="cyan")
    if sample.kind != "train":
        text.append(f" {sample.kind}", style="magenta")
    text.append(f"  {versions(sample)}", style="blue")
    text.append("" if line.lag is None else f" lag {line.lag}", style="dim" if not line.lag else "yellow")
    text.append(f"  reward {sample.score:.3f}{_parts(sample)}", style=f"bold {reward_colour(sample.score)}")
    text.append(f"  {sample.response_length} tokens  ")
    if sample.turns is not None or len(sample.sequences) > 1:
        turns = "" if sample.turns is None else f"{len(sample.turns.at)} turns in "
        text.append(f"{turns}{len(sample.sizes)} sequence{'s' * (len(sample.sizes) > 1)}  ", style="cyan")
    text.append(sample.status.value, style="green" if sample.status == "completed" else "yellow")
    text.append(f" ({plain(sample.finish_reason)})" if sample.finish_reason else "", style="dim")
    text.append(f"  {plain(sample.actor)}", style="dim")
    return text


def versions(sample: Sample) -> str:
    """Return ``v4``, ``v4-5``, or ``no version`` for an empty response."""
    if not sample.spans:
        return "no version"
    return (
        f"v{sample.min_version}"
        if sample.min_version == sample.max_version
        else f"v{sample.min_version}-{sample.max_version}"
    )


def reward_colour(score: float) -> str:
    """Return green for a reward of at least ``_GOOD``, red for one of 0 or less, else yellow."""
    return "green" if score >= _GOOD else "red" if score <= 0 else "yellow"


def _one_line(text: str) -> str:
    line = " ".join(plain(text).split())
    return line if len(line) <= _LABEL_SIZE else f"{line[:_LABEL_SIZE]}…"


def _parts(sample: Sample) -> str:
    if not isinstance(sample.reward, dict):
        return ""
    return " (" + ", ".join(f"{plain(name)} {value:.3g}" for name, value in sample.reward.items()) + ")"
