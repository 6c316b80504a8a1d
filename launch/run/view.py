"""The view of a run on a terminal, and as plain lines without one."""

import asyncio
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.bus.wire.messages import Sample
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run.summary import newest_scores_in_words, scores_in_words, scores_lines
from tidemill.launch.run.watch import SILENT_S, RunWatch

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0  # Seconds between two lines of the plain view
# Seconds without a step behind which the plain view names what the processes wait for, and again as often.
QUIET_S = 30.0
EVENTS_EVERY_S = 1.0  # Seconds after which the plain view prints new events
PLOT_HEIGHT = 9
NUM_NUMBERS = 9  # Number of lines of the block of numbers
NUMBERS_WIDTH = 38
AXIS_WIDTH = 7
NUM_EVENTS = 3
LEAST_PROCESSES = 2  # Lines of the table of processes that are always there
NUM_SETS = 2  # Maximum number of evaluation sets whose newest scores are shown
COMFORTABLE_HEIGHT = 30  # Lines of a terminal from which on the plot has its full height
WIDEST = 140  # Most columns of the view
_BARS = " ▁▂▃▄▅▆▇█"
# Braille dots of a cell from bottom to top, (left, right).
_DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))


async def show_live(watch: RunWatch, title: str, console: Console) -> None:
    """Background loop: draw until cancelled, and once more then."""

    def fitted() -> Panel:
        return picture(watch, title, width=min(console.width, WIDEST), height=console.height)

    with Live(
        console=console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        try:
            while True:
                live.update(fitted(), refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            live.update(fitted(), refresh=True)


async def show_plain(watch: RunWatch, console: Console) -> None:
    """Background loop: print events and evaluations once, and a line of progress every few seconds."""
    printed: set[str] = set()
    printed_step, next_s, quiet_since_s = -1, 0.0, time.monotonic()

    def show(*lines: str) -> None:
        events = [event for event in (*watch.events, *evaluations(watch)) if event not in printed]
        printed.update(events)
        for line in (*events, *lines):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        while True:
            show()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + PLAIN_EVERY_S
                line = _progress_line(watch, printed_step)
                if not line and time.monotonic() >= quiet_since_s + QUIET_S:
                    line = waits(watch)
                if line:
                    show(f"{watch.elapsed_s:5.0f} s   {line}")
                    quiet_since_s = time.monotonic()
                printed_step = printed_step if watch.bus_silence else watch.step
            await asyncio.sleep(EVENTS_EVERY_S)
    finally:
        show()


def _progress_line(watch: RunWatch, printed_step: int) -> str:
    """Return the silence of the bus, the numbers of a new step, or what the processes wait for; empty without news."""
    if watch.full or not (watch.bus_silence or watch.outcomes):
        return waits(watch)
    if watch.bus_silence:
        return watch.bus_silence
    return "   ".join(f"{name} {value}" for name, value in watch.flat().items()) if watch.step > printed_step else ""


def evaluations(watch: RunWatch) -> list[str]:
    """Return the scores of all versions that were evaluated, in words, by version."""
    return [f"evaluation {scores_in_words(line)}" for line in scores_lines(watch.evaluated)]


def waits(watch: RunWatch) -> str:
    """Return the phases and troubles of the processes, as shown before the first step and when no step comes."""
    if watch.full:
        return f"the bus stores nothing, the run waits: {watch.full}"
    troubles = "; ".join(f"{row.id}: {row.trouble}" for row, _ in watch.rows if row.trouble)
    rows = [f"{row.role} {row.phase}" + (f" ({row.waits_for})" if row.waits_for else "") for row, _ in watch.rows]
    since = f"behind step {watch.step}" if watch.outcomes else "starting"
    phases = ", ".join(rows) or "no process has sent a heartbeat yet"
    return (f"{troubles}; " if troubles else "") + f"{since}: {phases}"


def picture(watch: RunWatch, title: str, *, width: int = 100, height: int = 32) -> Panel:
    """Return the view, no larger than this. A block that does not fit loses lines at its bottom."""
    inner = width - 4
    events = list(watch.events)[-NUM_EVENTS:]
    if watch.bus_silence:
        events = [*events[1 - NUM_EVENTS :], watch.bus_silence]
    plot_height = PLOT_HEIGHT if height >= COMFORTABLE_HEIGHT else NUM_NUMBERS - 1
    room = height - 9 - (plot_height + 1) - len(events)
    scores = newest_scores_in_words(watch.evaluated.values())[: max(0, min(NUM_SETS, room - LEAST_PROCESSES))]
    blocks: list[Table | Text] = [
        progress(watch),
        Text(),
        _middle(watch, inner, plot_height),
        Text(),
        _processes(watch, max(LEAST_PROCESSES, room - len(scores))),
        Text(),
        _sample(watch.sample),
        *(Text(f"evaluation {words}", no_wrap=True, overflow="ellipsis") for words in scores),
    ]
    lines = [Text(event, style="yellow", no_wrap=True, overflow="ellipsis") for event in events]
    group = Group(*blocks, *lines)
    return Panel(group, title=f"[bold]{title}[/]", border_style="cyan", padding=(0, 1), width=width)


def progress(watch: RunWatch) -> Table:
    """Return the step, a bar, and the time that is gone and left."""
    left_s = watch.left_s()
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    left = f", {timedelta(seconds=int(left_s))} left" if left_s is not None else ""
    clock = f"{timedelta(seconds=int(watch.elapsed_s))} gone{left}"
    row.add_row(
        Text(f"step {watch.step}/{watch.steps}", style="bold"),
        ProgressBar(total=watch.steps, completed=watch.step),
        Text(clock, style="dim"),
    )
    return row


def _middle(watch: RunWatch, inner: int, plot_height: int) -> Table:
    columns = Table.grid(padding=0)
    columns.add_column(width=inner - NUMBERS_WIDTH, no_wrap=True, overflow="crop")
    columns.add_column(width=NUMBERS_WIDTH)
    columns.add_row(_reward(watch, max(10, inner - NUMBERS_WIDTH - AXIS_WIDTH - 3), plot_height), _numbers(watch))
    return columns


def _reward(watch: RunWatch, width: int, height: int) -> Text:
    rewards, losses = watch.series("data/reward_mean"), watch.series("train/sft_loss")
    name, best, text = "reward", max, Text()
    if losses and not any(rewards):  # a run of demonstrations, which have none
        rewards, name, best = losses, "cross-entropy", min
    if not rewards:
        lines = textwrap.wrap(waits(watch), width + AXIS_WIDTH)[:height]
        return Text("\n".join(["reward", *lines, *[""] * (height - len(lines))]), style="dim")
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    text.append(f"{name} {rewards[-1]:.3f}", style="bold green")
    text.append(f"   first {rewards[0]:.3f}, best {best(rewards):.3f}", style="dim")
    lines = plot(rewards, width=width, height=height, low=low, high=high, total=watch.steps)
    for place, line in enumerate(lines):
        level = high if place == 0 else low if place == len(lines) - 1 else None
        text.append(f"\n{level:5.2f}" if level is not None else "\n     ", style="dim")
        text.append(" ┤" if level is not None else " │", style="dim")
        text.append(line, style="green")
    return text


def plot(values: Sequence[float], *, width: int, height: int, low: float, high: float, total: int) -> list[str]:
    """Return a curve in braille, 2 x 4 dots a character; ``total`` values would fill the width."""
    columns, levels = width * 2, height * 4
    cells = [[0] * width for _ in range(height)]
    span = (high - low) or 1.0
    total = max(total, len(values))
    for column in range(columns):
        start = column * total // columns
        end = max(start + 1, (column + 1) * total // columns)
        part = values[start:end]
        if not part:
            break
        value = sum(part) / len(part)
        level = min(levels - 1, max(0, round((value - low) / span * (levels - 1))))
        cells[height - 1 - level // 4][column // 2] |= _DOTS[level % 4][column % 2]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def _numbers(watch: RunWatch) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", justify="right", no_wrap=True, width=9)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in _facts(watch):
        table.add_row(name, value)
    return table


def _facts(watch: RunWatch) -> list[tuple[str, str | Text]]:
    actors, (waiting, leased) = watch.share("actor"), watch.backlog or (0, 0)
    feeder, stream = watch.load("feeder"), watch.samples
    lag = Text(f"{watch.newest('offpolicy/lag_mean'):.2f} mean, {watch.newest('offpolicy/lag_max'):.0f} max  ")
    learner = f"learner {watch.newest('train/wait_share'):.0%}"
    return [
        ("lag", lag.append(_lags(watch))),
        ("|Δ log p|", f"{watch.newest('offpolicy/logprob_diff_abs'):.4f}, k3 {watch.newest('offpolicy/k3'):.4f}"),
        ("entropy", f"{watch.newest('train/entropy'):.3f} nats"),
        ("tokens/s", f"{watch.rate_generated:.0f} generated, {watch.rate_trained:.0f} trained"),
        ("waiting", learner + (f", actors {actors:.0%}" if actors is not None else "")),
        ("tasks", f"{waiting} waiting, {leased} leased"),
        ("buffer", f"{feeder.get('buffered', 0):.0f} samples of {feeder.get('open_tasks', 0):.0f} tasks"),
        ("stream", f"{stream.last_seq} samples, {stream.bytes / 1e6:.1f} MB" if stream is not None else ""),
        ("push", _push(watch)),
    ]


def _push(watch: RunWatch) -> str:
    if watch.newest("push/version", -1) < 0:
        return "none yet"
    seconds, stall = watch.newest("push/seconds"), watch.newest("push/stall_seconds_max")
    return f"v{watch.newest('push/version'):.0f}, {_duration(seconds)}, stall {_duration(stall)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.{0 if seconds >= 0.01 else 1}f} ms"


def _lags(watch: RunWatch) -> Text:
    """Return the shares of the trained tokens by lag, as bars."""
    text = Text()
    for lag in range(16):
        share = watch.newest(f"offpolicy/lag_share/{lag}", -1.0)
        if share >= 0:
            text.append(f"{lag}", style="dim").append(_BARS[round(share * (len(_BARS) - 1))] + " ", style="cyan")
    return text


def _processes(watch: RunWatch, lines: int) -> Table:
    """Return a table of the processes, no longer than ``lines``: those with a problem first, others summed up."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for name in ("process", "phase", "version", "waits for"):
        options = {"justify": "right" if name == "version" else "left", "ratio": 1 if name == "waits for" else None}
        table.add_column(name, no_wrap=True, overflow="ellipsis", **options)  # type: ignore[arg-type]
    shown = watch.rows
    if len(shown) > lines:  # of healthy processes, the first of each role
        roles = [row.role for row, _ in shown]
        order = sorted(range(len(shown)), key=lambda at: (_well(*shown[at]), roles.index(roles[at]) != at))
        shown = [watch.rows[place] for place in sorted(order[: lines - 1])]
    for row, age in shown:
        phase = f"silent for {age:.0f} s" if age > SILENT_S else row.phase
        style = "red" if age > SILENT_S else "green" if _well(row, age) else "yellow"
        version = str(row.version) if row.version >= 0 else ""
        waits_for = Text(row.trouble, style="red") if row.trouble else Text(row.waits_for)
        table.add_row(Text(f"{row.role} {row.id}"), Text(phase, style=style), version, waits_for)
    if len(shown) < len(watch.rows):
        names = {id(row) for row, _ in shown}
        unlisted = Counter(f"{row.role} {row.phase}" for row, _ in watch.rows if id(row) not in names)
        text = ", ".join(f"{count} {what}" for what, count in unlisted.items())
        table.add_row(Text("and more", style="dim"), "", "", Text(text, style="dim"))
    return table


def _well(row: LiveRow, age: float) -> bool:
    return age <= SILENT_S and row.phase in ("serving", "working") and not row.trouble


def _sample(sample: Sample | None) -> Text:
    if sample is None:
        return Text("no sample yet", style="dim")
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = str(prompt[-1].get("content", "")) if prompt else ""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("last sample ", style="dim")
    text.append(_one_line(prompt, 60))
    text.append(" → ", style="dim")
    text.append(_one_line(sample.response, 60) or "(nothing)", style="bold")
    text.append(f"   reward {sample.score:.2f}", style="green" if sample.score > 0.99 else "yellow")
    if sample.label is not None:
        text.append(f"   wanted {_one_line(str(sample.label), 24)}", style="dim")
    return text


def _one_line(text: str, length: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"{flat[: length - 1]}…"
