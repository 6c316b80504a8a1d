"""The rollout ``multi_turn``: the model asks tools, or plays an environment, until it is done.

::

    chat    messages --> answer with tool calls --> results as messages of role "tool" --> ... --> an answer without calls
    text    prompt --> text with a call (a regular expression) --> result --> text goes on --> ... --> a text without a call
    play    observation --> action --> observation, reward --> ... --> done

Every request begins with the texts of the one before, so tokens are reused and results are context: they are never trained.
"""

import importlib
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from tidemill.actors.episodes.programs.call_threads import MOST_HUNG, CallThreads
from tidemill.actors.episodes.programs.gem_environment import Gem
from tidemill.actors.episodes.programs.model import BudgetSpent, Policy
from tidemill.actors.episodes.programs.openenv import OpenEnv
from tidemill.actors.episodes.programs.skyrl_environment import SkyRL
from tidemill.actors.episodes.programs.tools import FAILED, Tool, tools_of
from tidemill.bus.system.coroutines import to_the_end
from tidemill.bus.wire.chat_messages import chat_messages

ENVIRONMENTS: dict[str, Callable[..., Any]] = {"openenv": OpenEnv, "gem": Gem, "skyrl_gym": SkyRL}
"""Environments that ship, by name."""
PROTOCOLS = ("chat", "text")
CALL = r"<call>((?:[^<]|<(?!/?call>))*+)</call>"
"""A call has no tag of a call in it: each opening tag is searched up to the next tag alone, so time is linear in the text."""
RESULT = "<result>{result}</result>"


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
    cut: bool = False
    """True if ``max_turns`` ended it: a call was not made, or the environment had not ended."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages of the next request, with protocol chat."""
    text: str = ""
    """Text of the next request, with protocol text."""
    place: Any = None
    """State of the environment, as its method ``state`` returned it; None = none yet."""
    done: bool = False


@dataclass(eq=False)
class MultiTurn:
    """Plays episodes with tools or an environment. The reward is ``actor.reward`` of the last answer, or the environment's, by turn.

    Raises ValueError for options that cannot be.
    """

    tools: Sequence[object] = ()
    """Names, import paths, or maps (``programs/tools.py``)."""
    protocol: str = "chat"
    """chat (the template writes the tools) | text."""
    max_turns: int = 8
    system: str = ""
    """System prompt, in front of the prompts of chats."""
    stop: Sequence[str] = ()
    """Strings that end a turn."""
    max_tokens: int = 0
    """Tokens of one turn at most; 0 = the task's."""
    tool_seconds: float = 10.0
    """Limit of one call of a tool."""
    max_hung_calls: int = MOST_HUNG
    """Calls of plain tools that still run after that limit. Their threads cannot be ended, so with one more the process is."""
    errors: str = "show"
    """A call that fails is shown to the model (show), or ends the episode (end)."""
    call: str = CALL
    """With text: the regular expression of a call; group 1 is the argument of the first tool, or it has groups ``tool``, ``argument``."""
    result: str = RESULT
    """With text: the text put behind a call, with ``{result}``."""
    environment: str = ""
    """Instead of tools: ``openenv``, ``gem``, ``skyrl_gym``, or the import path of a class with ``reset(data)`` and ``step(text)``; its
    observations are texts, or with chat lists of messages, too; for ``again: resume`` with ``state()`` and ``restore(state)``; its
    ``close()`` is called at the end."""
    environment_options: Mapping[str, Any] | None = None
    has_fixed_turns: ClassVar[bool] = False
    """True for a game that ends with its last turn, whatever the answer: ``max_turns`` cuts no episode short."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol: want {' or '.join(PROTOCOLS)}, got {self.protocol!r}")
        if self.errors not in ("show", "end"):
            raise ValueError(f"errors: want show or end, got {self.errors!r}")
        if self.environment and self.tools:
            raise ValueError("environment: want either tools or an environment, got both")
        if self.max_turns < 1 or not 0 < self.tool_seconds < 3600 or self.max_tokens < 0:
            raise ValueError(
                "want max_turns >= 1, tool_seconds in 0..3600 and max_tokens >= 0, got "
                f"{self.max_turns}, {self.tool_seconds}, {self.max_tokens}"
            )
        if isinstance(self.max_hung_calls, bool) or not isinstance(self.max_hung_calls, int) or self.max_hung_calls < 0:
            raise ValueError(f"max_hung_calls: want a whole number >= 0, got {self.max_hung_calls!r}")
        if "{result}" not in self.result:
            raise ValueError("result: want {result} in it")
        try:
            self._call = re.compile(self.call, re.DOTALL)
        except re.error as error:
            raise ValueError(f"call: {error}") from None
        if self.protocol == "text" and self.tools and not self._call.groups:
            raise ValueError("call: want a group for the argument")
        self._tools = tools_of(self.tools)
        self._threads = CallThreads(self.max_hung_calls)
        self._more: dict[str, Any] = {
            **({"stop": list(self.stop)} if self.stop else {}),
            **({"max_tokens": self.max_tokens} if self.max_tokens else {}),
        }
        self._environment = _environment(self.environment, self.environment_options or {}) if self.environment else None
        if self._environment is None or all(callable(getattr(self._environment[0], name, None)) for name in ("state", "restore")):
            self.resume = self._resume  # an environment that cannot return its state has none

    async def run(self, data: Mapping[str, Any], base_url: str, api_key: str, saves: bool = False) -> float | dict[str, float] | None:
        """Play one episode; return its reward: None = that of the last answer. ``saves``: store a state behind every turn."""
        return self.reward(data, await self.play(data, base_url, api_key, saves=saves))

    async def _resume(
        self, data: Mapping[str, Any], state: Mapping[str, Any], base_url: str, api_key: str
    ) -> float | dict[str, float] | None:
        """Go on behind a state of an earlier attempt."""
        return self.reward(data, await self.play(data, base_url, api_key, played=Played(**state), saves=True))

    def reward(self, data: Mapping[str, Any], played: Played) -> float | dict[str, float] | None:
        """Return the reward of an episode: those of an environment by turn, else None. Subclasses have others."""
        return dict(zip(played.ids, played.rewards, strict=True)) if played.rewards else None

    async def play(
        self, data: Mapping[str, Any], base_url: str, api_key: str, *, played: Played | None = None, saves: bool = False
    ) -> Played:
        """Play one episode to its end, from the start or from the turns ``played`` before.

        Raises RuntimeError for answers that are no answers; TypeError for a prompt of another form.
        """
        if played is None:
            played = Played()
            if self._environment is None and self.protocol == "chat":
                played.messages = _messages(data["prompt"], "prompt", self.system)
            elif self._environment is None:
                played.text = _text(data["prompt"])
        async with Policy(base_url, api_key) as policy, self._turns(data, played) as turn:
            try:
                while not played.done:
                    await turn(policy, played)
                    if not played.done and len(played.ids) >= self.max_turns:
                        played.done, played.cut = True, not self.has_fixed_turns
                    if saves:
                        await policy.save(asdict(played))
            except BudgetSpent:
                if not played.ids:  # the prompt alone is too long
                    raise
                played.spent = True
            if played.cut:
                await policy.truncated("max_turns")
        return played

    def _offered(self, data: Mapping[str, Any]) -> Mapping[str, Tool]:
        """Return the tools that the data row names, as it describes them; all of them where it names none.

        Raises ValueError for one that the rollout does not have.
        """
        named = (data.get("metadata") or {}).get("tools")
        if not isinstance(named, list) or not all(isinstance(one, Mapping) for one in named):
            return self._tools
        found = {}
        for one in named:
            schema = one if isinstance(one.get("function"), Mapping) else {"type": "function", "function": one}
            name = schema["function"].get("name")
            if name not in self._tools:
                raise ValueError(f"tools of the data row: want some of options.tools ({', '.join(self._tools) or 'none'}), got {name!r}")
            found[name] = replace(self._tools[name], schema=schema)
        return found

    async def _chat_turn(self, tools: Mapping[str, Tool], policy: Policy, played: Played) -> None:
        message = _noted(played, await policy.chat(played.messages, [tool.schema for tool in tools.values()], **self._more))
        calls = message.get("tool_calls") or []
        played.done = not calls
        if not calls or len(played.ids) == self.max_turns:
            return
        played.messages.append(message)
        for call in calls:
            asked = call["function"]
            result = await self._called(tools, asked.get("name", ""), _arguments(asked.get("arguments", "")), played)
            if self.errors == "end" and result.startswith(FAILED):
                played.done = True
                return
            played.messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": result})

    async def _text_turn(self, tools: Mapping[str, Tool], policy: Policy, played: Played) -> None:
        said = await _completed(policy, played, self._more)
        found = self._call.search(said) if tools else None
        played.done = found is None
        if found is None or len(played.ids) == self.max_turns:
            return
        groups = found.groupdict()
        name = groups.get("tool") or next(iter(tools))
        argument = groups.get("argument") if "argument" in groups else found[1]
        result = await self._called(tools, name, _argument_of(tools, name, argument or ""), played)
        played.done = self.errors == "end" and result.startswith(FAILED)
        played.text += said + self.result.replace("{result}", result)

    @asynccontextmanager
    async def _turns(self, data: Mapping[str, Any], played: Played) -> AsyncIterator[Callable[[Policy, Played], Awaitable[None]]]:
        """Give the function that plays a turn, for an environment in a new episode or in the one with the stored state."""
        if self._environment is None:
            yield partial(self._text_turn if self.protocol == "text" else self._chat_turn, self._offered(data))
            return
        made, options = self._environment
        game = made(**options)
        try:
            yield await self._begun(game, data, played)
        finally:
            if hasattr(game, "close"):
                await to_the_end(_awaited(game.close()))  # a container of the environment would stay

    async def _begun(self, game: Any, data: Mapping[str, Any], played: Played) -> Callable[[Policy, Played], Awaitable[None]]:
        """Begin a game, or go on with it, and return the function that plays a turn of it."""
        if played.place is not None:
            await _awaited(game.restore(played.place))
        else:
            observation = await _awaited(game.reset(dict(data)))
            if self.protocol == "chat":
                played.messages = _messages(observation, "the environment's observation", self.system)
            else:
                played.text = _text(observation)

        async def turn(policy: Policy, played: Played) -> None:
            """Ask once, and play the answer."""
            if self.protocol == "chat":
                message = _noted(played, await policy.chat(played.messages, **self._more))
                said = str(message.get("content") or "")
            else:
                said = await _completed(policy, played, self._more)
            observation, reward, played.done = await _awaited(game.step(said))
            played.rewards.append(float(reward))
            if not played.done and self.protocol == "chat":
                played.messages += _behind(said, observation)
            elif not played.done:
                played.text += said + _text(observation)
            played.place = await _awaited(game.state()) if hasattr(game, "state") else None

        return turn

    async def _called(self, tools: Mapping[str, Tool], name: str, arguments: object, played: Played) -> str:
        tool = tools.get(name)
        if tool is None:
            result = f"{FAILED} no tool {name!r}; there are {', '.join(tools) or 'none'}"
        else:
            result = await tool.call(arguments, seconds=self.tool_seconds, threads=self._threads)
        played.calls.append((name, arguments, result))
        return result


def _argument_of(tools: Mapping[str, Tool], name: str, text: str) -> object:
    """Return a text argument as a map: JSON if it is one, else the value of the tool's first parameter."""
    found = _arguments(text)
    if isinstance(found, Mapping) or name not in tools:
        return found
    first = next(iter(tools[name].parameters), None)
    return {} if first is None else {first: text}


async def _completed(policy: Policy, played: Played, more: Mapping[str, Any]) -> str:
    choice = await policy.complete(played.text, **more)
    played.ids.append(choice["id"])
    played.answers.append(str(choice["text"]))
    return played.answers[-1]


def _noted(played: Played, choice: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = dict(choice["message"])
    played.ids.append(choice["id"])
    played.answers.append(str(message.get("content") or ""))
    return message


def _arguments(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _messages(given: object, where: str, system: str = "") -> list[Mapping[str, Any]]:
    """Return a text, or messages, as messages. Raises ValueError that names the message; TypeError for anything else."""
    messages = chat_messages(given, where) if isinstance(given, list) else [{"role": "user", "content": _text(given)}]
    return [{"role": "system", "content": system}, *messages] if system else [*messages]


def _behind(said: str, observation: object) -> list[Mapping[str, Any]]:
    """Return an answer and the observation behind it. Messages that begin with one of the assistant have the answer as they want it."""
    seen = _messages(observation, "the environment's observation") if observation != [] else []
    return seen if seen and seen[0].get("role") == "assistant" else [{"role": "assistant", "content": said}, *seen]


def _text(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"want a text, got {type(prompt).__name__} (protocol: chat takes messages)")
    return prompt


def _environment(path: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    if path in ENVIRONMENTS:
        ENVIRONMENTS[path](**options)  # it refuses impossible options
        return ENVIRONMENTS[path], dict(options)
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"environment: want {', '.join(ENVIRONMENTS)} or module:Class, got {path!r}")
    made = getattr(importlib.import_module(module), name)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ValueError(f"environment: want a class with {method}, {path} has none")
    inspect.signature(made).bind(**options)
    return made, dict(options)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
