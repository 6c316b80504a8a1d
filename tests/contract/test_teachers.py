"""An actor's teachers: a real engine, and servers that hang, fail, answer nonsense or are not there."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from tests.engine_serving import log_probs_of, scores, serving
from tests.learner_steps import make_samples
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import turn
from tests.web_server import web_server
from tidemill.actors.config import ActorConfig
from tidemill.actors.teachers import TeacherFailed, Teachers
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.invariants import check_sample
from tidemill.bus.wire.messages import Sample, SequenceSize

ENDED = web.AppKey("ended", asyncio.Event)
"""Set at the end of a server: its handlers must have ended by then."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("teacher"), "llama")


def sampled(temperature: float = 1.0) -> Sample:
    return make_samples(vocab=300, temperature=temperature)[0]


def episode() -> Sample:
    """Return a sample of two sequences, with a token of the environment in the first."""
    one, two = make_samples(vocab=300, temperature=0.7)[:2]
    mask = np.concatenate([one.loss_mask, two.loss_mask])
    mask[1] = 0
    log_probs = np.concatenate([one.rollout_log_probs, two.rollout_log_probs]) * mask
    return replace(
        one,
        tokens=np.concatenate([one.tokens, two.tokens]),
        response_length=one.response_length + two.response_length,
        rollout_log_probs=log_probs.astype(np.float32),
        loss_mask=mask,
        spans=(*one.spans, *two.spans),
        sequences=(
            SequenceSize(len(one.tokens), one.response_length),
            SequenceSize(len(two.tokens), two.response_length),
        ),
    )


@asynccontextmanager
async def server(answer: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application[ENDED] = asyncio.Event()
    application.router.add_post("/generate", answer)
    async with web_server(application, shutdown_timeout=0.1) as url:
        try:
            yield url
        finally:
            application[ENDED].set()


@asynccontextmanager
async def teachers(*urls: str, **settings: Any) -> AsyncIterator[Teachers]:
    made = Teachers(ActorConfig(teachers={"big": {"urls": list(urls)}}, **settings))
    try:
        yield made
    finally:
        await made.close()


async def test_every_sequence_is_scored_with_its_own_context_at_the_temperature(model_dir: Path) -> None:
    sample, model = episode(), tiny_model("llama")
    async with serving(model_dir) as served, teachers(served.engine.url, teacher_top_k=2) as asked:
        found = await asked.score(sample, {})
    check_sample(found, vocab_size=300)
    assert (
        found.teacher_log_probs is not None
        and found.teacher_top_ids is not None
        and found.teacher_top_log_probs is not None
    )
    wanted, tokens_R, left = [], [], 0
    for size in sample.sizes:
        tokens = sample.tokens[left : left + size.num_tokens].tolist()
        prompt, response = tokens[: -size.response_length], tokens[-size.response_length :]
        wanted.append(await scores(model, prompt, response) / 0.7)
        tokens_R += response
        left += size.num_tokens
    whole = torch.cat(wanted)
    np.testing.assert_allclose(
        found.teacher_log_probs, np.where(sample.loss_mask, log_probs_of(whole, tokens_R), 0), atol=1e-4
    )
    top = whole.log_softmax(-1).topk(2, -1)
    assert found.teacher_top_ids.tolist() == top.indices.flatten().tolist()
    np.testing.assert_allclose(found.teacher_top_log_probs, top.values.flatten(), atol=1e-4)
    assert found.teacher_top_k == 2


async def test_a_response_without_tokens_needs_no_server() -> None:
    one = sampled()
    empty = replace(
        one,
        tokens=one.tokens[: -one.response_length],
        response_length=0,
        rollout_log_probs=np.zeros(0, np.float32),
        loss_mask=np.zeros(0, np.uint8),
        spans=(),
    )
    async with teachers("http://127.0.0.1:9", teacher_top_k=1) as asked:
        found = await asked.score(empty, {})
    check_sample(found)
    assert found.teacher_log_probs is not None and len(found.teacher_log_probs) == 0


async def hanging(request: web.Request) -> web.StreamResponse:
    await request.app[ENDED].wait()
    return web.Response()


async def failing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of memory"}}, status=500)


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such field"}}, status=400)


async def babbling(request: web.Request) -> web.StreamResponse:
    return web.json_response({"meta_info": {"input_token_logprobs": [["a", "b"]]}})


async def of_another_kind(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>login</html>", content_type="text/html")


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "reason", "asked"),  # asked: the smallest number of requests
    [
        (hanging, "no answer within", 0),  # its limit begins before the connection is made
        (failing, "HTTP 500: out of memory", 2),
        (refusing, "no such field", 1),
        (babbling, "its scores cannot be parsed", 2),
        (of_another_kind, "its scores cannot be parsed", 2),
        (hanging_up, "unavailable", 1),
    ],
)
async def test_a_teacher_that_fails_is_given_up_with_the_reason(answer: Handler, reason: str, asked: int) -> None:
    calls = []

    async def counting(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        return await answer(request)

    limit_s = {hanging: 2.0, hanging_up: 6.0}.get(answer, 60.0)  # these two are tried until their limit
    async with server(counting) as url, teachers(url, teacher_timeout_s=limit_s, teacher_attempts=2) as taught:
        with refusal(TeacherFailed, teacher="big", reason=re.compile(reason)):
            await taught.score(sampled(), {})
    assert len(calls) >= asked


async def test_a_teacher_that_is_not_there_is_waited_for(model_dir: Path) -> None:
    with KeptPort() as port:
        async with teachers(f"http://127.0.0.1:{port.number}", teacher_timeout_s=0.5) as taught:
            with refusal(TeacherFailed, teacher="big", reason=re.compile(r"\bunavailable\b"), outside=True):
                await taught.score(sampled(), {})
        async with teachers(f"http://127.0.0.1:{port.number}", teacher_timeout_s=60.0) as taught:
            waiting = asyncio.ensure_future(taught.score(sampled(), {}))
            await turn()
            async with serving(model_dir, port=port.number):
                assert (await waiting).teacher_log_probs is not None


async def test_of_several_servers_another_one_is_asked(model_dir: Path) -> None:
    async with (
        server(failing) as broken,
        serving(model_dir) as served,
        teachers(broken, served.engine.url, teacher_attempts=2) as taught,
    ):
        found = await asyncio.gather(*(taught.score(one, {}) for one in make_samples(vocab=300)[:4]))
    assert all(one.teacher_log_probs is not None for one in found)


async def test_a_row_without_a_teacher_and_one_without_an_address_are_refused() -> None:
    taught = Teachers(ActorConfig(teachers={"math": {"url": "http://127.0.0.1:9", "when": {"reward": "math"}}}))
    with refusal(TeacherFailed, teacher="", reason=re.compile("{'reward': 'code'}"), outside=False):
        await taught.score(sampled(), {"reward": "code"})
    await taught.close()
    silent = Teachers(ActorConfig(teachers={"big": {"model": "/m"}}))
    with refusal(TeacherFailed, teacher="big", reason=re.compile("`tidemill teacher /m`"), outside=True):
        await silent.score(sampled(), {})
