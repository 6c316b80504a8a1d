"""The rollout ``multi_turn``: the model asks tools, or plays an environment, until it is done.

::

    chat      messages --> answer with tool calls --> results as messages of role "tool" --> ... --> no calls
    text      prompt --> text with a call (a regular expression) --> result --> text goes on --> ... --> no call
    messages  messages --> answer with a call (the same) --> result as message of the user --> ... --> no call
    play      observation --> action --> observation, reward --> ... --> done

Every request begins with the texts of the one before, so tokens are reused and results are context: they are never
trained.
"""

import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from tidemill.actors.episodes.programs.environments import environment_class
from tidemill.actors.episodes.programs.tools import FAILED, MAX_HUNG, CallThreads, Tool, tools_of
from tidemill.bus.http.client import READ_BUFFER_BYTES, open_session
from tidemill.bus.system.coroutines import to_the_end
from tidemill.bus.wire.chat_messages import chat_messages, chat_tools
from tidemill.bus.wire.json_object import is_integer

PROTOCOLS = ("chat", "text", "messages")
CALL = r"<call>((?:[^<]|<(?!/?call>))*+)</call>"
"""A call has no tag of a call in it: each opening tag is searched up to the next tag alone, in linear time."""
RESULT = "<result>{result}</result>"


class BudgetSpent(Exception):
    """The episode has no tokens, turns or context left; it ends, and is trained as truncated."""


class PolicyClient:
    """The model of one episode. Close it at the end."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        # Without a limit of time: the gateway has one, and waits for engines on behalf of its episodes.
        self._session = open_session(
            headers={"Authorization": f"Bearer {api_key}"}, read_buffer_bytes=READ_BUFFER_BYTES
        )

    async def __aenter__(self) -> "PolicyClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **parameters: Any
    ) -> dict[str, Any]:
        """Return the answer's choice, with ``id``, the name of the turn. Raises BudgetSpent, RuntimeError."""
        body = {"model": "policy", "messages": list(messages), **parameters}
        return await self._choice("/chat/completions", body | ({"tools": list(tools)} if tools else {}))

    async def complete(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        """Return the completion's choice, with ``id``. Raises BudgetSpent, RuntimeError."""
        return await self._choice("/completions", {"model": "policy", "prompt": prompt, **parameters})

    async def save(self, state: object) -> None:
        """Store the episode's state, from which another actor goes on (``again: resume``). Raises RuntimeError."""
        await self._post("/state", {"state": state})

    async def truncated(self, limit: str) -> None:
        """Report the limit at which the program ends the episode: its sample is truncated. Raises RuntimeError."""
        await self._post("/truncated", {"limit": limit})

    async def _post(self, path: str, body: object) -> None:
        async with self._session.post(self._base_url.removesuffix("/v1") + path, json=body) as response:
            if response.status != 200:
                text = (await response.read())[:1000].decode(errors="replace")
                raise RuntimeError(f"{path}: {response.status}: {text}")

    async def _choice(self, path: str, body: object) -> dict[str, Any]:
        async with self._session.post(self._base_url + path, json=body) as response:
            content = await response.read()
            if response.status != 200:
                text = content[:1000].decode(errors="replace")
                if response.status == 400 and "context_length_exceeded" in text:
                    raise BudgetSpent(text)
                raise RuntimeError(f"the model answered {response.status}: {text}")
        answer = json.loads(content)
        return {**answer["choices"][0], "id": answer["id"]}


@dataclass(slots=True)
class Played:
    """An episode so far."""

    answers: list[str] = field(default_factory=list)
    """Texts that the model generated, by turn."""
    ids: list[str] = field(default_factory=list)
    """Names of these turns."""
    calls: list[tuple[str, object, str]] = field(default_factory=list)
    """(tool, arguments, result) of every call."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the turns, by an environment."""
    spent: bool = False
    """True if the budget ended it."""
    cut: str = ""
    """Option that ended it: ``max_turns`` (a call was not made, a game had not ended), ``max_tokens``; empty = none."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages of the next request, with protocol chat."""
    text: str = ""
    """Text of the next request, with protocol text."""
    place: Any = None
    """State of the environment, as its method ``state`` returned it; None = none yet."""
    done: bool = False


@dataclass(eq=False)
class MultiTurn:
    """Plays episodes with tools or an environment. The reward is ``actor.reward`` of the last answer, or the
    environment's, by turn.

    Raises ValueError for options that cannot be.
    """

    tools: Sequence[object] = ()
    """Names, import paths, or maps (``programs/tools.py``)."""
    protocol: str = "chat"
    """chat (the template writes the tools) | text | messages (of a chat whose template writes no tools; the
    system prompt describes them)."""
    max_turns: int = 8
    system: str = ""
    """System prompt, in front of the prompts of chats."""
    stop: Sequence[str] = ()
    """Strings that end a turn."""
    max_tokens: int = 0
    """Maximum tokens of a turn; 0 = the task's. With tools, an episode whose last answer they cut is truncated."""
    tool_seconds: float = 10.0
    """Limit of one call of a tool."""
    max_hung_calls: int = MAX_HUNG
    """Calls of plain tools that may hang: their threads cannot be ended, so with one more the process is ended."""
    errors: str = "show"
    """A call that fails is shown to the model (show), or ends the episode (end)."""
    call: str = CALL
    """With text, messages: the expression of a call. Group 1 is the first tool's argument; or it has ``tool`` and
    ``argument``.
    """
    result: str = RESULT
    """With text, messages: the text put behind a call, with ``{result}``."""
    environment: str = ""
    """Instead of tools: ``openenv``, ``gem``, ``skyrl_gym``, or the import path of a class with ``reset(data)`` and
    ``step(text)``; its observations are texts, or with chat lists of messages, too; for ``again: resume`` with
    ``state()`` and ``restore(state)``; its ``close()`` is called at the end.
    """
    environment_options: Mapping[str, Any] | None = None
    has_fixed_turns: ClassVar[bool] = False
    """True for a game that ends with its last turn, whatever the answer: ``max_turns`` cuts no episode short."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol: want {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        if self.errors not in ("show", "end"):
            raise ValueError(f"errors: want show or end, got {self.errors!r}")
        if self.environment and self.tools:
            raise ValueError("environment: want either tools or an environment, got both")
        if self.max_turns < 1 or not 0 < self.tool_seconds < 3600 or self.max_tokens < 0:
            want = "max_turns >= 1, tool_seconds in 0..3600 and max_tokens >= 0"
            raise ValueError(f"want {want}, got {self.max_turns}, {self.tool_seconds}, {self.max_tokens}")
        if not is_integer(self.max_hung_calls) or self.max_hung_calls < 0:
            raise ValueError(f"max_hung_calls: want a whole number >= 0, got {self.max_hung_calls!r}")
        if "{result}" not in self.result:
            raise ValueError("result: want {result} in it")
        try:
            self._call = re.compile(self.call, re.DOTALL)
        except re.error as error:
            raise ValueError(f"call: {error}") from None
        if self.protocol != "chat" and self.tools and not self._call.groups:
            raise ValueError("call: want a group for the argument")
        self._tools = tools_of(self.tools)
        self._threads = CallThreads(self.max_hung_calls)
        self._parameters: dict[str, Any] = {"stop": list(self.stop)} if self.stop else {}
        self._parameters |= {"max_tokens": self.max_tokens} if self.max_tokens else {}
        """Sampling parameters of every request."""
        self._environment = environment_class(self.environment, self.environment_options or {})
        methods = [getattr(self._environment, name, None) for name in ("state", "restore")]
        if self._environment is None or all(map(callable, methods)):
            self.resume = self._resume  # an environment that cannot return its state has none

    @property
    def chat_tools(self) -> Sequence[str]:
        """Names of the tools that the chat template writes; none with other protocols, whose prompts describe
        them.
        """
        return tuple(self._tools) if self.protocol == "chat" else ()

    async def run(
        self, data: Mapping[str, Any], base_url: str, api_key: str, saves: bool = False
    ) -> float | dict[str, float] | None:
        """Play an episode; return its reward, None = ``actor.reward``. ``saves``: store a state behind every turn."""
        return self.reward(data, await self.play(data, base_url, api_key, saves=saves))

    async def _resume(
        self, data: Mapping[str, Any], state: Mapping[str, Any], base_url: str, api_key: str
    ) -> float | dict[str, float] | None:
        """Go on behind a state of an earlier attempt."""
        return self.reward(data, await self.play(data, base_url, api_key, played=Played(**state), saves=True))

    def reward(self, data: Mapping[str, Any], played: Played) -> float | dict[str, float] | None:
        """Return the reward of an episode: an environment's rewards by turn, else None. Subclasses have others."""
        return dict(zip(played.ids, played.rewards, strict=True)) if played.rewards else None

    async def play(
        self, data: Mapping[str, Any], base_url: str, api_key: str, *, played: Played | None = None, saves: bool = False
    ) -> Played:
        """Play one episode to its end, from the start or from the turns ``played`` before.

        Raises RuntimeError for answers that are no answers; TypeError for a prompt of another form.
        """
        if played is None:
            played = Played()
            if self._environment is None:
                self._begin_with(played, data["prompt"], "prompt")
        async with PolicyClient(base_url, api_key) as policy, self._turns(data, policy, played) as play_turn:
            try:
                while not played.done:
                    await play_turn()
                    if not played.done and len(played.ids) >= self.max_turns:
                        played.done, played.cut = True, "" if self.has_fixed_turns else "max_turns"
                    if saves:
                        await policy.save(asdict(played))
            except BudgetSpent:
                if not played.ids:  # the prompt alone is too long
                    raise
                played.spent = True
            if played.cut:
                await policy.truncated(played.cut)
        return played

    def _begin_with(self, played: Played, prompt: object, where: str) -> None:
        """Set the first request of an episode, after a prompt or an observation."""
        if self.protocol != "text":
            played.messages = _messages(prompt, where, self.system)
        else:
            played.text = _text(prompt)

    def _tools_of(self, data: Mapping[str, Any]) -> Mapping[str, Tool]:
        """Return the tools that the data row names, as it describes them; all of them where it names none.

        Raises ValueError for one that the rollout does not have.
        """
        named = (data.get("metadata") or {}).get("tools")
        if not isinstance(named, list) or not all(isinstance(tool, Mapping) for tool in named):
            return self._tools
        tools = {}
        for schema in chat_tools(named, "tools of the data row"):
            name = schema["function"]["name"]
            if name not in self._tools:
                want = f"some of options.tools ({', '.join(self._tools) or 'none'})"
                raise ValueError(f"tools of the data row: want {want}, got {name!r}")
            tools[name] = replace(self._tools[name], schema=schema)
        return tools

    async def _chat_turn(self, tools: Mapping[str, Tool], policy: PolicyClient, played: Played) -> None:
        choice, message = await self._chat(policy, played, [tool.schema for tool in tools.values()])
        calls = message.get("tool_calls") or []
        played.done = not calls
        played.cut = self._cut(choice, played)
        if not calls or len(played.ids) == self.max_turns:
            return
        played.messages.append(message)
        for call in calls:
            function = call["function"]
            arguments = _arguments(function.get("arguments", ""))
            result = await self._call_tool(tools, function.get("name", ""), arguments, played)
            if self.errors == "end" and result.startswith(FAILED):
                played.done = True
                return
            played.messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": result})

    async def _text_turn(self, tools: Mapping[str, Tool], policy: PolicyClient, played: Played) -> None:
        choice = await self._complete(policy, played)
        if (result := await self._result(tools, choice, played)) is not None:
            played.text += played.answers[-1] + result

    async def _message_turn(self, tools: Mapping[str, Tool], policy: PolicyClient, played: Played) -> None:
        choice, message = await self._chat(policy, played)
        if (result := await self._result(tools, choice, played)) is not None:
            played.messages += [message, {"role": "user", "content": result}]

    async def _result(self, tools: Mapping[str, Tool], choice: Mapping[str, Any], played: Played) -> str | None:
        """Return the text behind the call in the last answer; None = no call, or no further turn."""
        answer = played.answers[-1]
        call_match = self._call.search(answer) if tools else None
        played.done = call_match is None
        played.cut = self._cut(choice, played)
        if call_match is None or len(played.ids) == self.max_turns:
            return None
        groups = call_match.groupdict()
        name = groups.get("tool") or next(iter(tools))
        argument = groups.get("argument") if "argument" in groups else call_match[1]
        result = await self._call_tool(tools, name, _argument_of(tools, name, argument or ""), played)
        played.done = self.errors == "end" and result.startswith(FAILED)
        return self.result.replace("{result}", result)

    @asynccontextmanager
    async def _turns(
        self, data: Mapping[str, Any], policy: PolicyClient, played: Played
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Give the function that plays a turn. An environment begins an episode, or goes on with the stored state."""
        if self._environment is None:
            turns = {"chat": self._chat_turn, "text": self._text_turn, "messages": self._message_turn}
            yield partial(turns[self.protocol], self._tools_of(data), policy, played)
            return
        game = self._environment(**self.environment_options or {})
        try:
            if played.place is not None:
                await _awaited(game.restore(played.place))
            else:
                observation = await _awaited(game.reset(dict(data)))
                self._begin_with(played, observation, "the environment's observation")
            yield partial(self._game_turn, game, policy, played)
        finally:
            if hasattr(game, "close"):
                await to_the_end(_awaited(game.close()))  # a container of the environment would stay

    async def _game_turn(self, game: Any, policy: PolicyClient, played: Played) -> None:
        if self.protocol != "text":
            await self._chat(policy, played)
        else:
            await self._complete(policy, played)
        answer = played.answers[-1]
        observation, reward, played.done = await _awaited(game.step(answer))
        played.rewards.append(float(reward))
        if not played.done and self.protocol != "text":
            played.messages += _behind(answer, observation)
        elif not played.done:
            played.text += answer + _text(observation)
        played.place = await _awaited(game.state()) if hasattr(game, "state") else None

    async def _chat(
        self, policy: PolicyClient, played: Played, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Ask for the answer to the messages; return its choice and its message."""
        choice = await policy.chat(played.messages, tools, **self._parameters)
        message: dict[str, Any] = dict(choice["message"])
        played.ids.append(choice["id"])
        played.answers.append(str(message.get("content") or ""))
        return choice, message

    async def _complete(self, policy: PolicyClient, played: Played) -> Mapping[str, Any]:
        choice = await policy.complete(played.text, **self._parameters)
        played.ids.append(choice["id"])
        played.answers.append(str(choice["text"]))
        return choice

    def _cut(self, choice: Mapping[str, Any], played: Played) -> str:
        """Return ``max_tokens`` where it has cut the last answer of a chat; the gateway knows the task's own limit."""
        return "max_tokens" if self.max_tokens and played.done and choice.get("finish_reason") == "length" else ""

    async def _call_tool(self, tools: Mapping[str, Tool], name: str, arguments: object, played: Played) -> str:
        tool = tools.get(name)
        if tool is None:
            result = f"{FAILED} no tool {name!r}; there are {', '.join(tools) or 'none'}"
        else:
            result = await tool.call(arguments, seconds=self.tool_seconds, threads=self._threads)
        played.calls.append((name, arguments, result))
        return result


def _argument_of(tools: Mapping[str, Tool], name: str, text: str) -> object:
    """Return a text argument as a map: JSON if it is one, else the value of the tool's first parameter."""
    arguments = _arguments(text)
    if isinstance(arguments, Mapping) or name not in tools:
        return arguments
    first = next(iter(tools[name].parameters), None)
    return {} if first is None else {first: text}


def _arguments(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _messages(value: object, where: str, system: str = "") -> list[Mapping[str, Any]]:
    """Return a text, or messages, as messages. Raises ValueError naming the message; TypeError for anything else."""
    messages = chat_messages(value, where) if isinstance(value, list) else [{"role": "user", "content": _text(value)}]
    return [{"role": "system", "content": system}, *messages] if system else [*messages]


def _behind(answer: str, observation: object) -> list[Mapping[str, Any]]:
    """Return an answer, as the observation repeats it where it begins with the assistant, and the observation."""
    messages = _messages(observation, "the environment's observation") if observation != [] else []
    has_answer = bool(messages) and messages[0].get("role") == "assistant"
    return messages if has_answer else [{"role": "assistant", "content": answer}, *messages]


def _text(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"want a text, got {type(prompt).__name__} (protocol: chat takes messages)")
    return prompt


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
