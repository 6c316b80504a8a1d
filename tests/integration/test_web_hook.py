"""Notices to a web hook: what is news, the forms, tries, bounds, and the secret URL."""

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import web

from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.http.listener import url_of
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.launch.run import web_hook
from tidemill.launch.run.web_hook import MOST_TRIES, MOST_WAITING, WebHook, checked_url
from tidemill.learner.algorithms.alarms import AlarmConfig, Context

SECRET = "T0/B0/s3cret"


class Hook:
    """A hook that answers with the next of ``statuses``, then 204; ``held`` waits for ``released``."""

    def __init__(self, *statuses: int, held: bool = False) -> None:
        self.bodies: list[Any] = []
        self.released = asyncio.Event()
        self._statuses, self._held = list(statuses), held

    async def __aenter__(self) -> "Hook":
        app = web.Application()
        app.router.add_post(f"/{SECRET}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"{url_of('127.0.0.1', self._runner.addresses[0][1])}/{SECRET}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.released.set()
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self._held:
            await self.released.wait()
        return web.Response(status=self._statuses.pop(0) if self._statuses else 204)


def notices(url: str, **changes: Any) -> WebHook:
    values: dict[str, Any] = {"alarms": AlarmConfig(), "context": Context(max_lag=2), "first_pause_s": 0.0}
    return WebHook(url, "digits", **(values | changes))


def done(step: int, epoch: int = 2, **metrics: float) -> Done:
    return Done(epoch=epoch, step=step, metrics={"train/tokens": 1000.0, **metrics})


BAD = {"offpolicy/k3": 0.2, "alarm/errors": 1.0}
SCORES = {"mean": 0.5, "mean_low": 0.4, "mean_high": 0.6, "samples": 4.0, "prompts": 4.0, "missing": 0.0}


def scored(version: int, epoch: int = 2, mean: float = 0.5) -> Evaluated:
    return Evaluated(epoch=epoch, version=version, step=version, dataset="val", metrics=SCORES | {"mean": mean})


async def test_alarms_scores_and_the_end_are_news_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Hook() as hook:
        sender = notices(hook.url)
        sender.after_epoch = 1
        async with sender.sending():
            for record in (done(1, epoch=1, **BAD), scored(1, epoch=1), scored(1)):
                sender.record(record)  # of an earlier start, and its scores recorded again
            for step in (2, 3, 4):
                sender.record(done(step, **BAD))
            sender.record(scored(2))
            sender.given_up("engine-0 ended 6 times")
            sender.ended("the run is complete", 0)
    kinds = [body["kind"] for body in hook.bodies]
    assert kinds == ["alarm", "evaluation", "give-up", "end"]
    alarm = hook.bodies[0]
    assert (alarm["run"], alarm["step"], alarm["level"]) == ("digits", 2, "error")
    assert "offpolicy/k3 = 0.2" in alarm["text"] and "lower max_lag" in alarm["text"]
    assert hook.bodies[3]["code"] == 0 and not caplog.records


async def test_slack_gets_one_escaped_text() -> None:
    async with Hook() as hook:
        sender = notices(hook.url, form="slack")
        async with sender.sending():
            sender.given_up("<!channel> & so on")
    assert hook.bodies == [{"text": "digits: give-up: &lt;!channel&gt; &amp; so on"}]
    assert notices("https://hooks.slack.com/services/x").is_slack and not notices("https://example.org/").is_slack


async def test_a_hook_that_fails_is_tried_again_and_one_that_refuses_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async with Hook(500, 429, 204, 404) as hook:
        sender = notices(hook.url)
        async with sender.sending():
            sender.given_up("first")
            sender.given_up("second")
    assert [body["text"] for body in hook.bodies] == ["first", "first", "first", "second"]
    assert sender.dropped == 1 and "status 404" in caplog.text


async def test_a_hook_that_is_away_ends_in_a_drop_without_its_url(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tidemill")
    async with Hook() as hook:
        url = hook.url
    sender = notices(url)
    async with sender.sending():
        sender.given_up("nobody hears it")
    assert sender.dropped == 1 and "ClientConnectorError" in caplog.text
    assert SECRET not in caplog.text


async def test_a_hook_that_does_not_answer_holds_a_bounded_number_and_the_end_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_hook, "FLUSH_S", 0.1)
    async with Hook(held=True) as hook:
        sender = notices(hook.url)
        async with asyncio.timeout(LIMIT_S), sender.sending():
            for number in range(2 * MOST_WAITING):
                sender.given_up(f"{number}")
            assert len(sender.waiting) == MOST_WAITING and sender.dropped == MOST_WAITING


async def test_an_impossible_host_of_a_proxy_is_a_drop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender ended with its UnicodeError, and the end of the run waited for notices that nothing sent."""
    monkeypatch.setenv("http_proxy", f"http://{'x' * 70}.example:1/")
    monkeypatch.setattr(web_hook, "FLUSH_S", 300.0)
    sender = notices("http://h.example/")
    async with asyncio.timeout(LIMIT_S), sender.sending():
        sender.given_up("first")
        sender.given_up("second")
    assert sender.dropped == 2 and "UnicodeError" in caplog.text


async def test_the_end_waits_for_no_sender_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_hook, "FLUSH_S", 300.0)
    sender = notices("http://127.0.0.1:1/")
    async with asyncio.timeout(LIMIT_S), sender.sending():
        sender.ended("over", object())  # type: ignore[arg-type]  # what JSON cannot have
        sender.given_up("second")
    assert "sending failed error=TypeError" in caplog.text and "unsent count=1" in caplog.text


async def test_without_a_hook_nothing_is_kept() -> None:
    sender = notices("")
    async with sender.sending():
        sender.record(done(1, **BAD))
        sender.ended("over", 0)
    assert not sender.waiting


def test_alarms_that_the_learner_did_not_raise_are_no_news() -> None:
    """The learner knows its data type: a mismatch of 0.005 is an alarm in float32 alone."""
    mismatch = {"offpolicy/fresh_logprob_diff_abs": 0.005}
    sender = notices("http://h/")
    sender.record(done(1, **mismatch))
    assert not sender.waiting
    sender.record(done(2, **mismatch, **{"alarm/warnings": 1.0}))
    assert "numerics" in sender.waiting[0]["text"]


@pytest.mark.parametrize(
    "text",
    [
        *("hooks.slack.com/x", "ftp://h/x", "https:///T0", "T0/B0/s3cret"),
        *(
            "https://a..b/x",
            f"https://{'x' * 70}.example/x",
            "https://h:s3cret/x",
            "https://h:70000/x",
            "https://[::1/x",
        ),
    ],
)
def test_another_text_than_a_url_is_refused_without_naming_it(text: str) -> None:
    with refusal(ValueError, place="TIDEMILL_WEBHOOK") as caught:
        checked_url(text)
    assert text not in str(caught.value)
    assert MOST_TRIES < 10
