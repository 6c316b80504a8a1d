"""``tidemill dashboard --export``: a run as one HTML file, which needs no server and asks no host for anything.

    answers of the reader + modules, style --> one file, with a policy that names the digests of its script and style

The page's modules ask a source for answers by path; here they are in the file, under the same paths. What does not fit
into ``MAX_BYTES`` is left out, oldest samples first, and named.
"""

import argparse
import asyncio
import base64
import hashlib
import html
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import metadata

from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.batch import batch_of
from tidemill.launch.page.configuration import configuration_of
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.samples import MAX_PAGE, SampleAnswers
from tidemill.launch.page.serve import model_dirs, readers
from tidemill.launch.page.static_files import read_files
from tidemill.launch.page.texts import to_json

log = logging.getLogger(__name__)

MAX_BYTES = 24 << 20
NUM_BATCHES = 20
READ_S = 120.0  # Longest time for records and headers; what is read by then is exported
AUDIT_S = 300.0


async def export(bus: Bus, args: argparse.Namespace) -> int:
    """Write the file and return 0. Raises ValueError, BusError."""
    reader, answers = readers(bus, args)
    answers.mode = "exported"
    samples = SampleAnswers(reader, model_dirs(args))
    async with beside(reader.run()):
        await _read(reader)
        data = await _data(reader, answers, samples)
    await reader.close()
    page = html_of(data, bus.run)
    await asyncio.to_thread(write_whole, args.export, page)
    print(f"{args.export}: {len(page.encode()) / 1e6:.1f} MB", file=sys.stderr)
    return 0


async def _read(reader: RunReader) -> None:
    """Wait until records, headers and, of an ended run, the audit are there, or their time is over."""
    try:
        async with asyncio.timeout(READ_S):
            await reader.loaded.wait()
            await reader.headers_read.wait()
            await reader.looked.wait()
        async with asyncio.timeout(AUDIT_S):
            if reader.ended:
                reader.begin_audit()
                await reader.audit_ended.wait()
    except TimeoutError:
        log.warning("exported before everything was read")


async def _data(reader: RunReader, answers: RunAnswers, samples: SampleAnswers) -> JsonObject:
    listed = await samples.page("", None, MAX_PAGE, texts=True)
    made: JsonObject = {
        "/api/run": answers.run(),
        "/api/overview": answers.overview(),
        "/api/metrics": answers.metrics(),
        "/api/series": answers.series(),
        "/api/flow": answers.flow(),
        "/api/lags": answers.lags(),
        "/api/fleet": _without_logs(answers.fleet()),
        "/api/histogram": await samples.histogram(""),
        "/api/samples": listed,
        "/api/config": configuration_of(reader.settings.row),
        "/api/prompts": await samples.prompts(),
        "/api/runs": {"runs": [{"name": reader.bus.run, "this": True, "from": "bus", "steps": reader.metrics.last}]},
    }
    position = {"boot": "exported", "at": 0}
    made = {path: {**answer, **position} for path, answer in made.items()}
    left_bytes, truncated = MAX_BYTES - len(to_json(made)), list[str]()
    seqs = [row["seq"] for row in listed["rows"]]
    steps = sorted(reader.plan_seqs)[-NUM_BATCHES:][::-1]
    wanted: list[tuple[str, Callable[[], Awaitable[JsonObject]]]] = [
        *((f"/api/batch?step={step}", partial(batch_of, reader, samples, step)) for step in steps),
        *((f"/api/sample?seq={seq}", partial(samples.sample, {"seq": str(seq)})) for seq in seqs),
    ]
    for number, (path, answer) in enumerate(wanted):
        try:
            value = {**await answer(), **position}
        except (BusError, ValueError) as error:
            log.info("not exported: %s: %s", path, error)
            continue
        left_bytes -= len(embedded(value))
        if left_bytes < 0:
            truncated.append(f"{len(wanted) - number} of {len(wanted)} steps and samples: the file would be too large")
            break
        made[path] = value
    if listed["next"]:
        truncated.append(f"samples before #{listed['next']}: the newest {MAX_PAGE} are here")
    exported = {"version": _version(), "time_s": reader.now_s, "truncated": truncated}
    return {"exported": exported, "answers": made}


def _without_logs(fleet: JsonObject) -> JsonObject:
    """Return the fleet without the places of its logs: they are of no use in a file that is passed on."""
    lanes = [{name: value for name, value in lane.items() if not name.startswith("log")} for lane in fleet["lanes"]]
    return fleet | {"lanes": lanes}


def html_of(data: JsonObject, run: str) -> str:
    """Return the file. Raises ValueError for modules that cannot be joined."""
    files = read_files()
    script, style = (files[name].body.decode() for name in ("app.js", "app.css"))
    icon = base64.b64encode(files["icon.svg"].body).decode()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(run)}</title><link rel="icon" href="data:image/svg+xml;base64,{icon}">'
        f"<style>{style}</style></head><body>"
        f'<script type="application/json" id="exported">{embedded(data)}</script>'
        f'<script type="module">{script}</script></body></html>\n'
    )


def embedded(value: object) -> str:
    """Return JSON that ends no element, wherever it stands in the HTML."""
    text = to_json(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _version() -> str:
    try:
        return metadata.version("tidemill")
    except metadata.PackageNotFoundError:
        return "unknown"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
