"""Reward registry: finds a reward, or another function with a contract, by name or import path and binds its options.

Knows how a reward is called, not its computation.
"""

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tidemill.bus.errors import WireError
from tidemill.bus.system.functions import Defect, FunctionRefused, described, errors_as, find_function, nearest, repr_at
from tidemill.bus.wire.invariants import check_reward
from tidemill.bus.wire.task_settings import BY_ROLLOUT
from tidemill.rewards.errors import BadRewardOption, RewardFailed, RewardNotImported, UnknownReward, is_outside
from tidemill.rewards.other_systems import path_in, peer_reward, system_of
from tidemill.rewards.port import Contract, Parts, RewardRequest, Scorer, from_request, to_request

# Built-in rewards. All but those in ``UNBOUNDED`` take time linear in the response, and run in the event loop.
TABLE = {
    "by_rollout": "tidemill.rewards.registry:by_rollout",
    "code": "tidemill.rewards.builtin.code:code",
    "dapo": "tidemill.rewards.builtin.math_rewards:dapo",
    "deepscaler": "tidemill.rewards.builtin.math_rewards:deepscaler",
    "digits": "tidemill.rewards.builtin.text:digits",
    "exact": "tidemill.rewards.builtin.text:exact",
    "f1": "tidemill.rewards.builtin.text:f1",
    "format": "tidemill.rewards.builtin.text:format_tags",
    "gpqa": "tidemill.rewards.builtin.text:gpqa",
    "gsm8k": "tidemill.rewards.builtin.math_rewards:gsm8k",
    "ifeval": "tidemill.rewards.builtin.ifeval:ifeval",
    "judge": "tidemill.rewards.judge:Judge",
    "length": "tidemill.rewards.builtin.text:length",
    "math": "tidemill.rewards.builtin.math_rewards:math",
    "math_answer": "tidemill.rewards.builtin.math_answer:math_answer",
    "overlong": "tidemill.rewards.builtin.text:overlong",
    "math_verify": "tidemill.rewards.builtin.math_equality:math_verify",
    "regex": "tidemill.rewards.builtin.text:regex",
    "remote": "tidemill.rewards.remote:Remote",
    "repetition": "tidemill.rewards.builtin.text:repetition",
    "reward_model": "tidemill.rewards.judge:RewardModel",
    "sentence": "tidemill.rewards.builtin.text:sentence",
}

# Built-in rewards that can take long, and run in child processes.
#
# ``ifeval`` is linear for each instruction, but the data decides how many a prompt has: ten, with a response of 400,000
# characters, took 2 s.
UNBOUNDED = frozenset({"code", "ifeval", "judge", "math_verify", "regex", "remote", "reward_model"})

UNBOUNDED_WITH = {"math": "rest"}

ASKING = frozenset({"judge", "remote", "reward_model"})  # Built-in rewards that ask a server
# They name servers, variables, files or programs: a configuration from elsewhere is not trusted with them
NAMING = ASKING | {"code", "sentence"}
# They run programs in a sandbox; ``obstacle()`` of their modules returns why this machine has none
SANDBOXED = frozenset({"code"})
# They compare the response with the label, which must be text or a number
COMPARING = frozenset(
    {"dapo", "deepscaler", "digits", "exact", "f1", "gpqa", "gsm8k", "math", "math_answer", "math_verify"}
)
SEVERAL = frozenset({"deepscaler", "exact", "f1", "math", "math_verify"})  # They take a list of labels, too

IN_THREAD = "in_thread"  # Option of plain (not async) rewards: run in a thread. Default: true for import paths.

_KINDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

MAX_PARTS = 256  # Limit of the named numbers of a reward
MAX_THREADS = 256  # Limit of threads per reward: a thread cannot be stopped, so calls that hang would accumulate


def load(name: str, options: Mapping[str, object] | None = None) -> Scorer:
    """Return the reward called ``name``, or at the import path ``package.module:function``, with its options bound.

    The scorer, which has no time limit, raises RewardFailed when the reward raises anything but TimeoutError, and when
    the result is no number, or map of numbers, that a sample may have (``bus/wire/invariants.py``). Raises
    UnknownReward or BadRewardOption, which suggest the nearest existing name.
    """
    bound = bind(name, options)
    # A reward of unknown speed must not stop the event loop, in which an actor also renews the leases of its tasks.
    in_thread = dict(options or {}).get(IN_THREAD, name not in TABLE or is_unbounded(name, options))
    if not isinstance(in_thread, bool):
        raise BadRewardOption(name, IN_THREAD, f"want true or false, got {in_thread!r}")
    call: Callable[[RewardRequest], Any] = _Threaded(bound) if in_thread and not bound.is_async else bound

    async def score(request: RewardRequest) -> float | dict[str, float]:
        try:  # without the block of ``errors_as``: this is done for each sample
            result: object = call(request)
            if inspect.isawaitable(result):
                result = await result
        except (RewardFailed, TimeoutError):
            raise
        except (Exception, SystemExit) as error:
            raise RewardFailed(name, repr_at(error), outside=is_outside(error)) from error
        return checked(name, result)

    return score


def is_unbounded(name: str, options: Mapping[str, object] | None = None) -> bool:
    """Return whether a built-in reward can take long with these options, so that it runs in child processes."""
    return name in UNBOUNDED or bool((options or {}).get(UNBOUNDED_WITH.get(name, "")))


@dataclass(frozen=True, slots=True)
class Bound:
    """A reward, or another function with a contract, with its options."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, object]
    contract: Contract

    def __call__(self, argument: object) -> Any:
        return self.function(argument, **self.options)

    def checked(self, argument: object) -> Any:
        """Call a plain function; return its checked result. Raises RewardFailed, also for its own errors."""
        with errors_as(lambda error: RewardFailed(self.name, repr_at(error), self.contract.word), but=(RewardFailed,)):
            return self.contract.checked(self.name, self(argument))

    @property
    def is_async(self) -> bool:
        return _is_async(self.function)


def _obstacle(name: str) -> str:
    """Return why this machine cannot have a built-in reward's sandbox; empty if it can."""
    return str(importlib.import_module(TABLE[name].partition(":")[0]).obstacle())


def bind(name: str, options: Mapping[str, object] | None = None, contract: Contract | None = None) -> Bound:
    """Find a function of a contract (default: a reward) and bind its options, all but ``in_thread``.

    Raises UnknownReward, RewardNotImported (its module raised something else than ImportError), BadRewardOption.
    """
    contract = contract or REWARD
    if contract is REWARD and name in SANDBOXED and (reason := _obstacle(name)):
        raise UnknownReward(name, reason)
    own_options = {option: value for option, value in (options or {}).items() if option != IN_THREAD}
    if contract is REWARD and (path := path_in(name)):
        function = _find(path, contract)
        reward = peer_reward(name, function, own_options, is_async=_is_async(function))
        return Bound(name, reward, {}, contract)
    function = _find(name, contract)
    if contract is REWARD and name not in TABLE and not inspect.isclass(function) and (system := system_of(function)):
        reason = f"its parameters are those of a reward of {system}; want {system}:{name}, which calls it so"
        raise UnknownReward(name, reason)
    if not inspect.isclass(function):
        _check_options(name, function, own_options, contract)
        return Bound(name, function, own_options, contract)
    # A class is made once, with the options, and its instances are called: it may keep a connection or a model.
    _check_options(name, function.__init__, own_options, contract)
    with errors_as(lambda error: BadRewardOption(name, "*", _reason(error), contract.word, contract.options)):
        instance = function(**own_options)
    if not callable(instance):
        reason = f"want a class whose instances can be called with the {contract.argument}"
        raise UnknownReward(name, reason, contract.word)
    return Bound(name, instance, {}, contract)


def _reason(error: BaseException) -> str:
    """Return the reason for which a class refused its options, with the line of any error that is not about them."""
    return str(error) if isinstance(error, TypeError | ValueError) else described(error)


def _is_async(function: Callable[..., Any]) -> bool:
    # A function may be an object with an async ``__call__``, for which the first test is False.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _find(name: str, contract: Contract) -> Callable[..., Any]:
    table, word = contract.table, contract.word
    if ":" not in name and name not in table:
        want = f"one of {sorted(table)}{nearest(name, table)}, or an import path package.module:function"
        raise UnknownReward(name, f"want {want}", word)
    try:
        return find_function(table.get(name, name))
    except FunctionRefused as error:
        refused = RewardNotImported if error.defect is Defect.IMPORT else UnknownReward
        raise refused(name, error.reason, word) from error


def _check_options(
    name: str, function: Callable[..., object], options: Mapping[str, object], contract: Contract
) -> None:
    """Compare options with the signature: known, complete, and of the annotated type if it is a simple one.

    Raises UnknownReward or BadRewardOption.
    """

    def refused(option: str, reason: str) -> BadRewardOption:
        return BadRewardOption(name, option, reason, contract.word, contract.options)

    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name: p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise UnknownReward(name, f"want a function whose first parameter is the {contract.argument}", contract.word)
    for option in options:
        if option not in named and not takes_any:
            options_there = sorted([*named, *([IN_THREAD] if contract is REWARD else [])])
            raise refused(option, f"no such option{nearest(option, named)}; there are {options_there}")
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise refused(option, "missing, and it has no default")
    for option, kind in _hints(function).items():
        if option in options and (want := _wanted_instead(options[option], kind)):
            raise refused(option, f"want {want}, got {options[option]!r}")


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    try:
        return get_type_hints(target)
    except (NameError, TypeError):  # annotations that cannot be evaluated are not checked
        return {}


def _wanted_instead(value: object, kind: Any) -> str:
    """Return the wanted values in words; empty where this is one, or the annotation is not checked."""
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {', '.join(map(repr, get_args(kind)))}"
    if kind not in _KINDS:
        return ""
    # bool is a subclass of int, but true is no number of a configuration.
    fits = kind is bool if isinstance(value, bool) else isinstance(value, (int, float) if kind is float else kind)
    return "" if fits else _KINDS[kind]


def checked(name: str, result: object) -> float | dict[str, float]:
    """Return the result of a reward as numbers that a sample may have. Raises RewardFailed."""
    reward: float | dict[str, float]
    if isinstance(result, Mapping):
        if len(result) > MAX_PARTS:
            raise RewardFailed(name, f"want at most {MAX_PARTS} named numbers, got {len(result)}")
        if unwritable := [part for part in map(str, result) if not part.isprintable()]:
            raise RewardFailed(name, f"want names of printable characters, got {unwritable[0]!r}"[:500])
        reward = {str(part): _number(f"{name}.{part}", value) for part, value in result.items()}
    else:
        reward = _number(name, result)
    try:
        check_reward(reward)
    except WireError as error:
        part = error.field.removeprefix("reward")
        raise RewardFailed(f"{name}{part}", f"want {error.want}, got {error.got!r}") from None
    return reward


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardFailed(name, f"want a number, got {value!r}") from None


# The contract of rewards: a RewardRequest in, a number or named numbers out
REWARD = Contract(
    word="reward",
    options="reward_options",
    argument="RewardRequest",
    path="tidemill.rewards.registry:REWARD",
    table=TABLE,
    encode=from_request,
    decode=to_request,
    checked=checked,
)


def by_rollout(request: RewardRequest) -> float:
    """Raise RewardFailed: it is asked only for a response that has no reward yet."""
    cure = "let its program return one, or name a reward for such episodes"
    raise RewardFailed(BY_ROLLOUT, f"the rollout gave the episode no reward; {cure}")


class _Threaded:
    """Runs a plain reward in a daemon thread per call: one that hangs blocks neither loop, nor others, nor exit."""

    def __init__(self, reward: Bound) -> None:
        self._name, self._reward = reward.name, reward
        self._running = 0

    async def __call__(self, request: RewardRequest) -> Parts:
        if self._running >= MAX_THREADS:
            reason = f"{self._running} calls are running or hang; no more are started"
            raise RewardFailed(self._name, reason, outside=True)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Parts] = loop.create_future()

        def finish(result: Any, error: Exception | None) -> None:
            self._running -= 1
            if not future.done():  # else it is cancelled: the caller has stopped waiting
                future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = self._reward(request)
            except (RewardFailed, TimeoutError) as failed:
                error = failed
            # SystemExit and its like must not end the actor, and a future refuses StopIteration.
            except BaseException as raised:
                error = RewardFailed(self._name, repr_at(raised), outside=is_outside(raised))
                error.__cause__ = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the future
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=work, name=f"reward-{self._name}", daemon=True).start()
        # Counted only now, because ``start`` raises where the machine has no thread left. ``finish`` runs in this loop,
        # so it comes later.
        self._running += 1
        return await future
