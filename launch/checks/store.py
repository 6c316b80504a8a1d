"""Check of the store of checkpoints: its protocol has a package here, and this process can write to it."""

import queue
import threading

from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints.object_store import ObjectStore, missing_package
from tidemill.learner.errors import StoreFailed
from tidemill.learner.settings.checkpoint_store import OF_THIS_MACHINE, protocol_of

SETTING = "learner.checkpoint.store"
ANSWER_S = 20.0
"""Longest time in which the store takes a small object, returns and removes it."""


def check_store(report: Report, config: RunConfig, *, reach: bool, answer_s: float = ANSWER_S) -> None:
    """Check the URL of the store, if there is one. ``reach``: write, read and remove a small object there, too."""
    url, where = config.learner.checkpoint.url, report.at(SETTING)
    if not url:
        return
    if protocol_of(url) == "memory":
        cure = "use the URL of an object store, or local"
        report.error("store", where, want="a store that outlives a process", got=url, cure=cure)
    elif missing := missing_package(url):
        got, cure = missing
        report.error("store", where, want=f"a protocol that can be used here, as in {url}", got=got, cure=f"{cure}, or set local")
    elif reach:
        _reach(report, where, ObjectStore(url, config.run), answer_s)
    elif protocol_of(url) in OF_THIS_MACHINE and config.learner.nodes > 1:
        cure = "use an object store, unless the path is one directory for all nodes"
        report.warning("store", where, want="a store that all nodes reach", got=f"{url}, a path of each machine", cure=cure)


def _reach(report: Report, where: str, store: ObjectStore, answer_s: float) -> None:
    """Write, read and remove a small object, in a thread that a store without an answer keeps, and that ends with the process."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def probe() -> None:
        """Report the error of the probe, or nothing."""
        try:
            store.probe()
        except StoreFailed as error:
            answers.put(error.reason)
        else:
            answers.put("")

    threading.Thread(target=probe, name="store", daemon=True).start()
    try:
        reason = answers.get(timeout=answer_s)
    except queue.Empty:
        reason = f"no answer within {answer_s:.0f} s"
    if reason:
        cure = "give its package the credentials (environment, its own files), or fix the URL"
        report.error("store", where, want="a place that this process can write to", got=f"{store.url}: {reason}", cure=cure)
    else:
        report.good("store", f"{store.url}: a small object was written, read and removed")
