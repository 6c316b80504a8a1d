"""How a run looks on a terminal, and as plain lines where there is none."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bus.messages import Sample
from launch.watch import Watch

REFRESH_S = 0.5
PLAIN_EVERY_S = 5.0
PLOT_WIDTH, PLOT_HEIGHT = 64, 7
_BARS = " ▁▂▃▄▅▆▇█"
_DOTS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
"""Braille dots of a cell from bottom to top, left and right."""


async def show_live(watch: Watch, title: str, console: Console) -> None:
    """Draw until cancelled, and once more then."""
    with Live(console=console, auto_refresh=False, transient=False, redirect_stdout=False, redirect_stderr=False) as live:
        try:
            while True:
                live.update(picture(watch, title), refresh=True)
                await asyncio.sleep(REFRESH_S)
        finally:
            live.update(picture(watch, title), refresh=True)


async def show_plain(watch: Watch, console: Console) -> None:
    """A line every few seconds in which a step was done, and every event once."""
    told: set[str] = set()
    told_step = -1
    while True:
        for event in [event for event in watch.events if event not in told]:
            told.add(event)
            console.print(event, markup=False, highlight=False)
        if watch.step > told_step and watch.outcomes:
            told_step = watch.step
            words = "   ".join(f"{name} {value}" for name, value in watch.flat().items())
            console.print(f"{watch.elapsed_s:5.0f} s   {words}", markup=False, highlight=False, soft_wrap=True)
        elif not watch.outcomes:
            console.print(f"{watch.elapsed_s:5.0f} s   {waiting_words(watch)}", markup=False, highlight=False, soft_wrap=True)
        await asyncio.sleep(PLAIN_EVERY_S)


def waiting_words(watch: Watch) -> str:
    """Who waits for what, before the first step is done."""
    rows = [f"{row.role} {row.phase}" + (f" ({row.waits_for})" if row.waits_for else "") for row, _ in watch.rows]
    return "starting: " + (", ".join(rows) if rows else "no process has said anything yet")


def picture(watch: Watch, title: str) -> Panel:
    """The whole view."""
    return Panel(
        Group(_progress(watch), Text(), _middle(watch), Text(), _processes(watch), Text(), _sample(watch.sample), *_events(watch)),
        title=f"[bold]{title}[/]",
        border_style="cyan",
        padding=(0, 1),
    )


def _progress(watch: Watch) -> Table:
    left = watch.left_s()
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(width=14)
    row.add_column(ratio=1)
    row.add_column(justify="right", width=34)
    clock = f"{timedelta(seconds=int(watch.elapsed_s))} gone" + (f", {timedelta(seconds=int(left))} left" if left is not None else "")
    row.add_row(
        Text(f"step {watch.step}/{watch.steps}", style="bold"),
        ProgressBar(total=watch.steps, completed=watch.step),
        Text(clock, style="dim"),
    )
    return row


def _middle(watch: Watch) -> Table:
    both = Table.grid(expand=True, padding=(0, 2))
    both.add_column(width=PLOT_WIDTH + 7)
    both.add_column(ratio=1)
    both.add_row(_reward(watch), _numbers(watch))
    return both


def _reward(watch: Watch) -> Text:
    rewards = watch.series("data/reward_mean")
    if not rewards:
        return Text("reward\n" + waiting_words(watch), style="dim")
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    text = Text()
    text.append(f"reward {rewards[-1]:.3f}", style="bold green")
    text.append(f"   first {rewards[0]:.3f}, best {max(rewards):.3f}\n", style="dim")
    lines = plot(rewards, width=PLOT_WIDTH, height=PLOT_HEIGHT, low=low, high=high, total=watch.steps)
    for place, line in enumerate(lines):
        level = high if place == 0 else low if place == len(lines) - 1 else None
        text.append(f"{level:5.2f} " if level is not None else "      ", style="dim")
        text.append(line + "\n", style="green")
    return text


def plot(values: Sequence[float], *, width: int, height: int, low: float, high: float, total: int) -> list[str]:
    """A curve in braille: ``height`` lines of ``width`` characters, 2 x 4 dots each. ``total`` values would fill the width."""
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


def _numbers(watch: Watch) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", justify="right")
    table.add_column()
    actors = watch.share("actor")
    waiting, leased = watch.backlog or (0, 0)
    table.add_row("lag", f"{watch.newest('offpolicy/lag_mean'):.2f} mean, {watch.newest('offpolicy/lag_max'):.0f} max")
    table.add_row("", _lags(watch))
    table.add_row("|Δ log p|", f"{watch.newest('offpolicy/logprob_diff_abs'):.4f}, k3 {watch.newest('offpolicy/k3'):.4f}")
    table.add_row("tasks", f"{waiting} waiting, {leased} leased")
    if watch.samples is not None:
        table.add_row("stream", f"{watch.samples.last_seq} samples, {watch.samples.bytes / 1e6:.1f} MB")
    table.add_row("tokens/s", f"{watch.rate_generated:.0f} made, {watch.newest('train/tokens_per_second'):.0f} trained")
    table.add_row("waiting", f"learner {watch.newest('train/wait_share'):.0%}, actors {actors:.0%}" if actors is not None else "")
    table.add_row("push", f"version {watch.newest('push/version', -1):.0f}, {watch.newest('push/seconds') * 1000:.0f} ms")
    table.add_row("entropy", f"{watch.newest('train/entropy'):.3f} nats")
    return table


def _lags(watch: Watch) -> Text:
    """Shares of the trained tokens by lag, as bars."""
    text = Text()
    for lag in range(16):
        share = watch.newest(f"offpolicy/lag_share/{lag}", -1.0)
        if share >= 0:
            text.append(f"{lag}", style="dim").append(_BARS[round(share * (len(_BARS) - 1))] + " ", style="cyan")
    return text


def _processes(watch: Watch) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for name, options in (("process", {}), ("phase", {}), ("version", {"justify": "right"}), ("waits for", {"ratio": 1})):
        table.add_column(name, no_wrap=True, overflow="ellipsis", **options)  # type: ignore[arg-type]
    for row, age in watch.rows:
        silent = age > 5
        style = "red" if silent else "green" if row.phase in ("serving", "working") else "yellow"
        phase = f"silent for {age:.0f} s" if silent else row.phase
        table.add_row(f"{row.role} {row.id}", Text(phase, style=style), str(row.version) if row.version >= 0 else "", row.waits_for)
    return table


def _sample(sample: Sample | None) -> Text:
    if sample is None:
        return Text("no sample yet", style="dim")
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1].get("content", ""))
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


def _events(watch: Watch) -> list[Text]:
    return [Text(event, style="yellow", no_wrap=True, overflow="ellipsis") for event in list(watch.events)[-3:]]
