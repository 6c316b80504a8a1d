"""The page of a run that ``tidemill up`` has started: a process beside it, which neither delays nor ends it."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from tidemill.launch.run.process import launched

log = logging.getLogger(__name__)

URL_FILE = "dashboard.url"  # File in the run's directory with the address of its page
LOOK_S = 0.2
END_S = 2.0


async def keep_page(root: Path, run: str, bus_url: str, report: Callable[[str], None]) -> None:
    """Background loop: serve the page on a free port of loopback until cancelled, and report its address once.

    A page that ends is reported, and not started again: `tidemill dashboard` does that.
    """
    file = root / URL_FILE
    file.unlink(missing_ok=True)
    words = ["dashboard", "--run-dir", str(root), "--bus", bus_url, "--run", run, "--port", "0"]
    page = launched("dashboard", [*words, "--url-file", str(file)], root / "logs" / "dashboard.log")
    try:
        await page.start()
        ending = asyncio.create_task(page.wait(), name="dashboard")
        while not ending.done() and not file.exists():
            await asyncio.wait({ending}, timeout=LOOK_S)
        if file.exists():
            url, _, token = file.read_text().strip().partition("?")
            report(f"page of the run: {url}" + (f" (with its token in {file})" if token else ""))
        code = await ending
        report(f"the page of the run has ended with code {code}; log: {root}/logs/dashboard.log")
        await asyncio.Event().wait()
    except OSError as error:
        log.warning("the page of the run was not started: %s", error)
    finally:
        await page.end(END_S)
        file.unlink(missing_ok=True)
