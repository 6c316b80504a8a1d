"""What an open page of a run costs its reader, under the load of ``tests.bench.page``.

python -m tests.bench.page_browser [--rate 2000] [--processes 200] [--seconds 20]

Chromium shows one page after the other; a line for each has the seconds to the first drawn chart (median of
``--loads`` loads in a row, each beside one of the floor: one request of the same server, one canvas), the requests and
bytes until then, times of frames (drawing, without layout), the processor time of the page's thread and of the page's
server, the JavaScript heap, and the page's process: memory that it shares with no other.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.bench.page import ROOT, page
from tests.bench.sample_path import prepare
from tests.page.browser import Reader, open_browser, reading
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer

RUN = "bench"
STARTS_S = 5  # Time for the load to start
FRAMES = """() => { window.frames_ms = []; const ask = window.requestAnimationFrame;
  window.requestAnimationFrame = (draw) => ask((now) => {
    const began = performance.now(); draw(now); window.frames_ms.push(performance.now() - began); }); }"""
FLOOR = "static/app.css"
FIRST = """{
  const ask = window.requestAnimationFrame;
  let drawn = false;
  for (const name of ['stroke', 'fillRect']) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...places) {
      drawn ||= this.canvas.isConnected;
      return draw.apply(this, places);
    };
  }
  const look = () => {
    if (drawn || document.querySelector('main tr[aria-selected]')) window.first_ms = performance.now();
    else ask(look);
  };
  const draw = async () => {
    const answer = await (await fetch('/api/run', {cache: 'no-store'})).json();
    const canvas = document.createElement('canvas');
    document.body.append(canvas);
    canvas.getContext('2d').fillText(answer.run, 9, 9);
    ask(() => (window.first_ms = performance.now()));
  };
  if (location.pathname.endsWith('.css')) document.addEventListener('DOMContentLoaded', draw);
  else look();
}"""
"""Note the time of the first chart since the navigation began; on the floor's document, draw it. Pixels are not read
back for it: those of 48 empty charts in each frame took more time than the page itself."""
REQUESTS = """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
  .filter(item => item.startTime < window.first_ms)
  .map(item => [item.name.replace(location.origin, ''), item.startTime, item.responseEnd, item.transferSize])"""
PAGES = ("overview", "learning&q=metric", "fleet", "samples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--requests", action="store_true", help="print each request until the first chart")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(Path(directory) / "nats", BusConfig(port=-1)) as server,
    ):
        asyncio.run(prepare(server.url, RUN))
        seconds = (args.seconds + 10 + 3 * args.loads) * len(PAGES) + STARTS_S
        role = [sys.executable, "-m", "tests.bench.page", "--url", server.url, "--run", RUN, "--role", "load"]
        role += ["--rate", str(args.rate), "--processes", str(args.processes), "--seconds", str(seconds)]
        child = subprocess.Popen(role, stdout=subprocess.DEVNULL, cwd=ROOT)
        try:
            with page(server.url, RUN, Path(directory)) as (address, pid):
                time.sleep(STARTS_S)
                for name in PAGES:
                    print(json.dumps(measure(name, address, psutil.Process(pid), args)), flush=True)
        finally:
            child.kill()
            child.wait()


def measure(name: str, address: str, server: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of one page that is open for some seconds in a browser of its own."""
    with open_browser() as browser, reading(browser, address) as reader:
        session = reader.page.context.new_cdp_session(reader.page)
        session.send("Performance.enable")
        first = first_chart(reader, name, session, args)
        reader.page.evaluate(FRAMES)
        reader.page.wait_for_timeout(1000)
        reader.page.evaluate("window.frames_ms.length = 0")
        before, cpu_s, began_s = _metrics(session), sum(server.cpu_times()[:2]), time.monotonic()
        reader.page.wait_for_timeout(1000 * args.seconds)
        after, passed_s = _metrics(session), time.monotonic() - began_s
        served_s, memory = sum(server.cpu_times()[:2]) - cpu_s, renderer_bytes()
        frames = sorted(reader.page.evaluate("window.frames_ms")) or [0.0]
        stored = reader.page.evaluate("fetch('/api/samples?n=1').then(answer => answer.json())")["last_seq"]
    return first | {
        "frames": len(frames),
        "frame p50, ms": round(frames[len(frames) // 2], 2),
        "frame p95, ms": round(frames[int(0.95 * (len(frames) - 1))], 2),
        "frame max, ms": round(frames[-1], 2),
        "thread, % of a core": round(100 * (after["ThreadTime"] - before["ThreadTime"]) / passed_s, 1),
        "thread a frame, ms": round(1e3 * (after["ThreadTime"] - before["ThreadTime"]) / len(frames), 1),
        "heap, MB": round(after["JSHeapUsedSize"] / 1e6, 1),
        "process, MB": round(memory / 1e6, 1),
        "server, % of a core": round(100 * served_s / passed_s, 1),
        "samples so far": stored,
    }


def first_chart(reader: Reader, name: str, session: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the time to the first chart of a page, and of the floor, over loads that alternate."""
    reader.page.add_init_script(FIRST)
    times: dict[str, list[float]] = {f"#{name}": [], FLOOR: []}
    threads: dict[str, list[float]] = {place: [] for place in times}
    requests: list[list[Any]] = []
    for place in (FLOOR, f"#{name}") * args.loads:
        reader.page.goto("about:blank")
        before = _metrics(session)
        reader.page.goto(f"{reader.base}{place}")
        reader.page.wait_for_function("() => window.first_ms !== undefined", polling=20)
        threads[place].append(_metrics(session)["ThreadTime"] - before["ThreadTime"])
        times[place].append(reader.page.evaluate("window.first_ms") / 1e3)
        if place != FLOOR:
            requests = reader.page.evaluate(REQUESTS)
    if args.requests:
        print(*[[row[0], *map(round, row[1:])] for row in requests], sep="\n", file=sys.stderr)
    page_s, floor_s = (statistics.median(rows) for rows in times.values())
    page_thread_s, floor_thread_s = (statistics.median(rows) for rows in threads.values())
    return {
        "page": name.partition("&")[0],
        "first chart, s": round(page_s, 2),
        "floor, s": round(floor_s, 2),
        "thread to first chart, ms": round(1e3 * page_thread_s),
        "floor's thread, ms": round(1e3 * floor_thread_s),
        "requests": len(requests),
        "KB": round(sum(row[3] for row in requests) / 1e3, 1),
    }


def renderer_bytes() -> int:
    """Return the memory, shared with no other process, of the largest process in which this browser shows pages."""
    processes = psutil.Process().children(recursive=True)
    return max(process.memory_full_info().uss for process in processes if "--type=renderer" in process.cmdline())


def _metrics(session: Any) -> dict[str, float]:
    return {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}


if __name__ == "__main__":
    main()
