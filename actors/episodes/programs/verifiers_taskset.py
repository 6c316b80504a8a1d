"""Tasksets of verifiers (0.4) as rollouts: ``use: verifiers:TASKSET``. It runs where verifiers is installed, and
imports nothing of ours.

::

    episode --> environment of verifiers --> harness (``ChatLoop``, or one of verifiers) --> interception
            <-- rewards of its trace                                                --> Door --> gateway

verifiers keeps an HTTP client for each address of a model, so all episodes of a process share the address of ``Door``,
which forwards each call to the gateway of its episode. The gateway records tokens and log-probs; those in verifiers'
traces are not read.

``PYTHON verifiers_taskset.py TASKSET OPTIONS COUNT`` prints the taskset's tasks as rows of a prompt file.
Output of the taskset itself goes to stderr.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import (
    default_harness_id,
    env_config_type,
    harness_class,
    load_environment,
    load_taskset,
    resolve_env_config,
)

__all__ = ["ChatLoop"]
"""verifiers takes the one harness that a module exports."""

SESSION, TRAIN = "X-Session-ID", "X-Tidemill-Train"
"""Headers: the trace of a call, as verifiers sends it; and whether the gateway trains on the answer."""
SPENT = "context_length_exceeded"
"""Code of the gateway's answer when the episode's budget is spent."""
KEY = "verifiers"
"""Key of the task in the metadata of a prompt's row."""
MODEL = "policy"
FETCHES = ("", "bash", "null")
"""Harnesses that an agent has when none is chosen: the harnesses of verifiers fetch packages at their first use."""


class ChatLoop(vf.Harness):  # type: ignore[misc]  # verifiers is not installed where types are checked
    """A chat with the task's tools, in this process: the harness of agents for which none is chosen."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any
    ) -> ProgramResult:
        """Chat until an answer calls no tool or the budget is spent; any other refusal of a call is an error."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            _tools(mcp_urls, self.config.tool_timeout) as tools,
            aiohttp.ClientSession(headers=headers) as session,
        ):
            url, no_limit = f"{endpoint}/chat/completions", aiohttp.ClientTimeout(total=None)
            while True:
                body = {"model": ctx.model, "messages": messages}
                body |= {"tools": tools.schemas} if tools.schemas else {}
                async with session.post(url, json=body, timeout=no_limit) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    return ProgramResult(exit_code=0 if SPENT in text else 1, stdout="", stderr=text)
                message = json.loads(text)["choices"][0]["message"]
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [message, *[await tools.result(call) for call in message["tool_calls"]]]


class _Tools:
    """The tools of a task, which verifiers serves over MCP."""

    def __init__(
        self, schemas: Sequence[Mapping[str, Any]], places: Mapping[str, Any], servers: Mapping[str, Any]
    ) -> None:
        self.schemas, self._places, self._servers = list(schemas), places, servers

    async def result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with the result of a call; a call that cannot be made has an error as its result."""
        name, text = call["function"].get("name", ""), call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            content: Any = f"Error: want arguments as a JSON map, got {text[:200]}"
        elif name not in self._places:
            content = f"Error: no tool {name!r}; there are {', '.join(self._places) or 'none'}"
        else:
            content = await call_mcp(self._servers, self._places, name, arguments)
        return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}


@asynccontextmanager
async def _tools(urls: Mapping[str, str], timeout_s: float) -> AsyncIterator[_Tools]:
    async with AsyncExitStack() as stack:
        servers = {name: {"url": url, "timeout": timeout_s} for name, url in urls.items()}
        yield _Tools(*(await connect_mcp({"mcpServers": servers}, stack) if servers else ([], {}, {})))


_MAX_BODY_BYTES = 64 << 20
_MODELS = ("GET", "/v1/models")
"""The one request without the id of a trace."""


class Door:
    """The address of the model for all episodes of this process."""

    def __init__(self) -> None:
        self.episodes: dict[str, tuple[str, Any]] = {}
        """Base URL of the episode's gateway, and the trace, by the id of the trace."""
        self.url = ""

    async def start(self) -> None:
        """Listen, until the process ends."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20)
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._forward)
        # A call by a client that hangs up is ended at the gateway as well, which then does not train on its answer.
        # Bodies are not unpacked: a small one may become very large.
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _forward(self, request: web.Request) -> web.Response:
        episode = self.episodes.get(request.headers.get(SESSION, ""))
        if episode is None and (request.method, request.path) == _MODELS:  # every episode has the same models
            episode = next(iter(self.episodes.values()), None)
        if episode is None:
            return _refusal(410, message="no episode has this trace", code="episode_over")
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            return _refusal(415, message=f"Content-Encoding: want identity, got {encoding[:80]}")
        base_url, trace = episode
        headers = {SESSION: trace.agent.name, TRAIN: "1" if trace.agent.trainable else "0"}
        address, body = base_url.removesuffix("/v1") + request.path, await request.read()
        async with self._session.request(request.method, address, data=body, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type", "x-should-retry") if name in answer.headers}
            return web.Response(body=await answer.read(), status=answer.status, headers=kept)


def _refusal(status: int, **error: str) -> web.Response:
    return web.json_response({"error": error}, status=status)


class Taskset:
    """The program of ``use: verifiers:TASKSET``."""

    def __init__(
        self,
        id: str,
        model: str = "",
        taskset: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        renderer: str | Mapping[str, Any] | None = None,
    ) -> None:
        """``id``: of the taskset. ``taskset``, ``agent``, ``env``: fields of verifiers' configs of them; ``agent`` is
        for every role.

        ``renderer``: name or config of one of verifiers' renderers, which then make the token ids, with the tokenizer
        in ``model``; None = the gateway does, with the model's chat template. Raises ValueError, TypeError, and
        whatever verifiers raises.
        """
        self._id, self._model = id, model
        self._renderer = {"name": renderer} if isinstance(renderer, str) else renderer
        if self._renderer is not None and not model:
            raise ValueError("model: want the directory of the tokenizer, with a renderer")
        self._env = load_environment(resolve_env_config(_env_config(id, taskset or {}, agent or {}, env or {})))
        self._task = type(self._env.taskset).task_type()
        _refuse_unplayable(self._env, self._task)
        self._door = Door()
        self._serving: Any = None
        self._starting = asyncio.Lock()

    async def run(self, data: Mapping[str, Any], base_url: str) -> dict[str, float] | None:
        """Play the task of a prompt's row. Return the sum of its rewards, and each; None where the taskset has none.

        Raises ValueError for a row without a task of this taskset, RuntimeError for an episode that failed.
        """
        row = data["metadata"].get(KEY)
        if not isinstance(row, Mapping) or row.get("taskset") != self._id:
            got = row.get("taskset") if isinstance(row, Mapping) else row
            cure = f"tidemill data verifiers {self._id} FILE writes rows"
            raise ValueError(f"metadata.{KEY}: want a task of {self._id}, got {got!r}; {cure}")
        task = self._task(self._task.data_type().model_validate(row["task"]), self._env.config.taskset.task)
        context = await self._context()
        trace_ids: set[str] = set()  # a trace may be announced twice

        def admit(trace: Any) -> None:
            """Let the calls of a trace through, from now on."""
            trace_ids.add(trace.id)
            self._door.episodes[trace.id] = base_url, trace

        (slot,) = self._env.slots(task)
        try:
            return _rewards(await self._env.run_slot(slot, context, on_trace=admit))
        finally:
            for trace_id in trace_ids:
                del self._door.episodes[trace_id]

    async def _context(self) -> Any:
        """Return where verifiers finds the model, with the environment's servers started."""
        async with self._starting:
            if self._serving is None:
                if not self._door.url:  # it stays when the environment could not be started
                    await self._door.start()
                serving = self._env.serving()
                await serving.__aenter__()  # until the process ends, which ends all that it has started
                self._serving = serving
        where = {"base_url": self._door.url, "api_key_var": ""}
        if self._renderer is None:
            return vf.ModelContext(model=MODEL, client=vf.EvalClientConfig(**where))
        renderer = {"renderer": dict(self._renderer), "renderer_model_name": self._model}
        return vf.ModelContext(model=MODEL, client=vf.TrainClientConfig(**where, **renderer))


def _env_config(
    id: str, taskset: Mapping[str, Any], agent: Mapping[str, Any], env: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of the environment: on this machine, and with ``ChatLoop`` where no harness is chosen."""
    own_harness = default_harness_id(id)
    config: dict[str, Any] = {**env, "taskset": {**taskset, "id": id}}
    for role, field in env_config_type(id, str(env.get("id") or "")).model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        agent_config = {"runtime": {"type": "subprocess"}, **agent, **(env.get(role) or {})}
        harness = field.default.harness.id if field.default.harness is not None else own_harness
        if "harness" not in agent_config and harness in FETCHES:
            agent_config["harness"] = {"id": __name__}
        config[role] = agent_config
    return config


def _refuse_unplayable(env: Any, task: Any) -> None:
    """Raise ValueError for tasks that cannot be played where the agents run."""
    for role, config in env.config:
        if not isinstance(config, AgentConfig) or config.runtime.type != "subprocess":
            continue
        cure = f"set rollouts.NAME.options.agent.runtime: {{type: docker}} (role {role})"
        if task.NEEDS_CONTAINER:
            raise ValueError(f"{task.__name__} needs a container, got the runtime subprocess; {cure}")
        if config.harness is not None and harness_class(config.harness.id).NEEDS_CONTAINER:
            raise ValueError(f"the harness {config.harness.id} needs a container, got the runtime subprocess; {cure}")


def _rewards(episode: Any) -> dict[str, float] | None:
    """Return the rewards of an episode's one trained trace. Raises RuntimeError."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed, without an error"
        raise RuntimeError(reason)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        raise RuntimeError(f"want one trained agent, run once, got {names}: a sample has one reward")
    (trace,) = trained
    if not trace.rewards:
        return None
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise RuntimeError(f"reward {missing[0]}: not scored")
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **{name: reward.value for name, reward in trace.rewards.items()}, "score": trace.reward}


def rows(id: str, options: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield the first ``count`` tasks of a taskset as rows of a prompt file; 0 = all. Raises ValueError."""
    sections = [options.get(name) or {} for name in ("taskset", "agent", "env")]
    taskset = load_taskset(resolve_env_config(_env_config(id, *sections)).taskset)
    if not count and not taskset.bounded:
        raise ValueError(f"--count: {id} has tasks without end; want a number > 0, got 0")
    for task in islice(taskset, count or None):
        data = task.data
        label = getattr(data, "answer", None)
        yield {
            "prompt": data.prompt_text or data.description or data.name or f"{id} {data.idx}",
            "label": label if isinstance(label, str | int | float) else None,
            "metadata": {KEY: {"taskset": id, "task": data.model_dump(mode="json", exclude_defaults=True)}},
        }


if __name__ == "__main__":
    sys.path[0] = ""
    sys.modules["verifiers_taskset"] = sys.modules[__name__]  # by which name verifiers finds ChatLoop
    __name__ = "verifiers_taskset"
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # the taskset may print, and so may its processes; the rows alone go to stdout
        for row in rows(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps(row), file=out)  # escaped: a text may have lone surrogates, which no encoding has
