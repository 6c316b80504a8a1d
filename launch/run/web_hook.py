"""Notices of a run to a web hook: alarms, scores of evaluations, a process given up, the end.

    record, given_up, ended --(queue, bounded)--> POST, tried again --> the hook

Nothing waits for the hook but the end of ``tidemill up``, for ``FLUSH_S``. Its URL is a secret: it comes from the
environment or ``.env``, and stands in no log, setting or message.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from tidemill.bus.http.client import open_session
from tidemill.bus.system.coroutines import Waiter, ended
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.launch.run.summary import scores_in_words, scores_line
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.algorithms.alarms import AlarmConfig, Context, recorded

log = logging.getLogger(__name__)

VARIABLE = "TIDEMILL_WEBHOOK"
MOST_WAITING = 64
MOST_TRIES = 5
TIMEOUT_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 1.0, 30.0
FLUSH_S = 15.0
AGAIN_S = 600.0  # Seconds after which an alarm that has ceased, and comes back, is a notice again
_MOST_TEXT = 2000
_SLACK_HOST = "hooks.slack.com"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def checked_url(url: str) -> str:
    """Return the URL; empty = there is no hook. Raises ValueError, which does not name it, for another text."""
    try:
        parts = urlsplit(url)
        # What connecting would raise: a label of the host that is empty or too long, a port that is no number.
        is_possible = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # a UnicodeError is one; its text has the host
        is_possible = False
    if url and not (is_possible and parts.scheme in ("http", "https")):
        raise ValueError(f"{VARIABLE}: want a URL (https://...), got another text; set it in the environment or .env")
    return url


class WebHook:
    """The notices of one start. Without a URL it keeps nothing and sends nothing."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        form: str = "auto",
        alarms: AlarmConfig,
        context: Context,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """``form``: slack | json | auto (slack for a hook of Slack's). Raises as ``checked_url``."""
        self._url, self._run, self._alarms, self._context = checked_url(url), run, alarms, context
        self.is_slack = form == "slack" or (form == "auto" and urlsplit(url).hostname == _SLACK_HOST)
        self._first_pause_s = first_pause_s
        self.waiting: deque[JsonObject] = deque()
        """Notices to be sent, oldest first."""
        self._waiter, self._emptied = Waiter(), asyncio.Event()
        self._emptied.set()
        self._raised: dict[str, float] = {}
        """Time at which each alarm was last at its level."""
        self._scores: dict[tuple[int, str], Mapping[str, float]] = {}
        self.after_epoch = 0
        """Epoch of the newest learner before this start: its records are no news."""
        self.dropped = 0

    @classmethod
    def of(cls, config: RunConfig, url: str) -> Self:
        """Return the notices of a run. Raises as ``checked_url``."""
        context = Context(max_lag=config.staleness.max_lag, gate=config.staleness.gate)
        return cls(url, config.run, form=config.up.webhook, alarms=config.learner.algorithm.alarms, context=context)

    def record(self, record: Done | Evaluated) -> None:
        """Take a record of PLAN: a step may have alarms."""
        if isinstance(record, Evaluated):
            before = self._scores.get((record.version, record.dataset))
            self._scores[record.version, record.dataset] = record.metrics
            if before != record.metrics and record.epoch > self.after_epoch:
                self._note("evaluation", scores_in_words(scores_line(record)), step=record.step)
        elif record.epoch > self.after_epoch:
            now = time.monotonic()
            for alarm in recorded(record.metrics, self._alarms, self._context):
                key = f"{alarm.name} {alarm.level}"
                is_news = now - self._raised.get(key, float("-inf")) > AGAIN_S
                self._raised[key] = now
                if is_news:
                    self._note("alarm", f"step {record.step}: {alarm}", step=record.step, level=alarm.level)

    def given_up(self, reason: str) -> None:
        """Note that a process was given up, which ends the run."""
        self._note("give-up", reason)

    def ended(self, text: str, code: int) -> None:
        """Note the end of this start."""
        self._note("end", text, code=code)

    def _note(self, kind: str, text: str, **fields: object) -> None:
        if not self._url:
            return
        self.waiting.append(
            {"run": self._run, "kind": kind, "text": text[:_MOST_TEXT], "time_s": time.time(), **fields}
        )
        if len(self.waiting) > MOST_WAITING:
            self.waiting.popleft()
            self._drop(f"{MOST_WAITING} notices wait")
        self._emptied.clear()
        self._waiter.wake()

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send notices while entered, and for ``FLUSH_S`` afterwards the notices that wait."""
        if not self._url:
            yield
            return
        sending = asyncio.create_task(self._send_all(), name="web hook")
        try:
            yield
        finally:
            emptied = asyncio.create_task(self._emptied.wait(), name="web hook emptied")
            try:
                await asyncio.wait({emptied, sending}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await ended(emptied, sending)
            if not sending.cancelled() and (error := sending.exception()):
                log.warning("web hook: sending failed error=%s", type(error).__name__)
            if self.waiting:
                log.warning("web hook: notices unsent count=%d", len(self.waiting))

    async def _send_all(self) -> None:
        async with open_session(total_s=TIMEOUT_S, proxied=True) as session:
            while True:
                while self.waiting:
                    await self._send(session, self.waiting.popleft())
                self._emptied.set()
                await self._waiter.wait()

    async def _send(self, session: aiohttp.ClientSession, notice: JsonObject) -> None:
        """Send a notice, in several tries; one that the hook refuses, or does not take, is dropped."""
        body, pause_s, reason = self._body(notice), self._first_pause_s, ""
        for attempt in range(MOST_TRIES):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                async with session.post(self._url, json=body, allow_redirects=False) as answer:
                    if answer.status < 300:
                        return
                    reason = f"status {answer.status}"
                    if answer.status < 500 and answer.status not in (408, 429):
                        break
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # UnicodeError: of a proxy's host
                reason = type(error).__name__  # its text may have the URL
        self._drop(reason)

    def _body(self, notice: JsonObject) -> JsonObject:
        if not self.is_slack:
            return notice
        text = f"{notice['run']}: {notice['kind']}: {notice['text']}"
        return {"text": "".join(_ESCAPES.get(letter, letter) for letter in text)}

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        log.warning("web hook: a notice is dropped count=%d reason=%s", self.dropped, reason)
