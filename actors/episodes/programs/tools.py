"""Tools of multi-turn rollouts: functions of named arguments to a text, with a JSON schema that the model is shown."""

import ast
import asyncio
import contextvars
import dataclasses
import datetime
import enum
import inspect
import json
import math
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from tidemill.actors.episodes.programs.tool_schemas import hints_of, schema_of, typed
from tidemill.bus.system.functions import errors_as, find_function, text_of
from tidemill.rewards.sandbox import Bounds, run

FAILED = "Error:"
"""Beginning of the result of a call that failed."""
MAX_RESULT = 20_000
"""Characters of a result that the model is shown."""


MAX_HUNG = 32
"""Calls that may hang in a process by default: their threads' stacks are 256 MB, of a child's 4 GB."""


class ProcessUnusable(Exception):
    """This process can run no more episodes: its actor, which knows the class by its name, starts another one."""


class CallThreads:
    """The calls of plain functions of one process."""

    def __init__(self, most_hung: int = MAX_HUNG) -> None:
        self._most_hung = most_hung
        self.hung = 0
        """Calls that were given up and still run."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the function's result. When cancelled, the call goes on in its thread, and is hung until it ends."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(value: Any, error: BaseException | None) -> None:
            if done.done():
                self.hung -= 1
            elif error is None:
                done.set_result(value)
            else:
                done.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(function, *args, **kwargs)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed, and the process ends
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, daemon=True, name=f"call of {getattr(function, '__name__', function)}").start()
        try:
            return await done
        except asyncio.CancelledError:
            self.hung += done.cancelled()  # else the call ended in the instant of the cancellation
            raise

    def given_up(self, name: str, seconds: float) -> None:
        """Report a call that was given up after so many seconds. Raises ProcessUnusable when more hang than may."""
        report(f"tool {name!r}: no result within {seconds:g} s; calls that hang in this process: {self.hung}")
        if self.hung > self._most_hung:
            raise ProcessUnusable(
                f"want at most {self._most_hung} calls of tools that hang in a process "
                f"(options.max_hung_calls), got {self.hung}, "
                f"the last of tool {name!r}: no result within {seconds:g} s"
            )


def report(text: str) -> None:
    """Send a hung call to the actor, for its log and its status row, where this process is a child of one."""
    module = sys.modules.get("tidemill_rollout")
    if module is not None:
        module.report_hung(text)


class _ToolFailed(Exception):
    """A tool has raised an error: it is the user's code, and its arguments are the model's."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """Entry of the tool in ``tools`` of a chat request."""
    hints: Mapping[str, Any]
    """Annotations of its arguments, by name."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.schema["function"]["parameters"]["properties"])

    async def call(self, arguments: object, *, seconds: float, threads: CallThreads) -> str:
        """Return the result as text; every failure is a text, too, that begins with ``Error:``.

        A plain function runs in a thread. Raises ProcessUnusable when too many of these hang.
        """
        if not isinstance(arguments, Mapping):
            return f"{FAILED} want a map of arguments, got {type(arguments).__name__}"
        try:
            async with asyncio.timeout(seconds) as limit:
                with errors_as(lambda error: _ToolFailed(text_of(error)), but=(TimeoutError,)):
                    inspect.signature(self.function).bind(**arguments)
                    typed_arguments = {name: typed(value, self.hints.get(name)) for name, value in arguments.items()}
                    if inspect.iscoroutinefunction(self.function):
                        result = await self.function(**typed_arguments)
                    else:
                        result = await threads.run(self.function, **typed_arguments)
                    return shortened(result if isinstance(result, str) else json_text(result))
        except TimeoutError:
            if limit.expired() and not inspect.iscoroutinefunction(self.function):
                threads.given_up(self.name, seconds)
            return f"{FAILED} no result within {seconds:g} s"
        except _ToolFailed as error:
            return shortened(f"{FAILED} {error}")


def shortened(text: str, max_size: int = MAX_RESULT) -> str:
    """Return beginning and end of a text above ``max_size`` characters, with the number of characters left out."""
    if len(text) <= max_size:
        return text
    half = max_size // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


def json_text(result: object) -> str:
    """Return a result as JSON. Numbers that JSON lacks are null. Raises TypeError for values that it lacks."""
    return json.dumps(_plain(result), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str() if not isinstance(value, enum.Enum):
            return value
        case float():
            return value if math.isfinite(value) else None
        case enum.Enum():
            return _plain(value.value)
        case Mapping():
            return {
                name if isinstance(name, str) else str(_plain(name)): _plain(inner) for name, inner in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value]
        case bytes():
            return value.decode(errors="replace")
        case datetime.date() | datetime.time() | datetime.timedelta() | Decimal() | Fraction() | UUID() | PurePath():
            return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    for method in ("tolist", "model_dump"):  # of arrays and their numbers; of pydantic
        if callable(getattr(value, method, None)):
            return _plain(getattr(value, method)())
    raise TypeError(f"want a text, or values of JSON, as the tool's result, got {type(value).__name__}")


def tools_of(entries: Sequence[object]) -> dict[str, Tool]:
    """Return the tools by name. Each is a name, ``module:function``, or a map with ``use``, ``options`` and, if needed,
    ``name``.

    Raises ValueError naming the entry. A class is made with the options, and its instance is called; a function gets
    them besides its arguments.
    """
    tools = [_tool(entry, f"tools[{place}]") for place, entry in enumerate(entries)]
    if twice := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        raise ValueError(f"tools: want different names, got {twice[0]!r} twice; name one of them by name:")
    return {tool.name: tool for tool in tools}


def _tool(setting: object, where: str) -> Tool:
    entry: Mapping[str, Any] = setting if isinstance(setting, Mapping) else {"use": setting}
    use, options = entry.get("use"), entry.get("options", {})
    if not isinstance(use, str) or not isinstance(options, Mapping) or not entry.keys() <= {"use", "options", "name"}:
        raise ValueError(f"{where}: want a name, module:function, or a map with use, options and name, got {setting!r}")
    path = TABLE.get(use, use)
    if ":" not in path:
        raise ValueError(f"{where}: want one of {', '.join(TABLE)}, or module:function, got {use!r}")
    target: Any = find_function(path, where)
    if inspect.isclass(target):
        target, options = target(**options), {}
    function: Callable[..., Any] = target if inspect.isroutine(target) else target.__call__
    name = str(entry.get("name") or (use if use in TABLE else use.rpartition(":")[2]))
    return Tool(name, _with(function, options), schema_of(name, function, options), hints_of(function))


def _with(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with options bound, which its signature no longer has."""
    if not options:
        return function
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in options]

    async def bound_async(**arguments: Any) -> Any:
        return await function(**arguments, **options)

    def bound(**arguments: Any) -> Any:
        return function(**arguments, **options)

    with_options: Any = bound_async if inspect.iscoroutinefunction(function) else bound
    with_options.__signature__ = signature.replace(parameters=parameters)
    return with_options


# ---- the tools that ship

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OF_MATH = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor", "ceil", "gcd")
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _OF_MATH}
_FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": round}
_NAMES = {"pi": math.pi, "e": math.e}
MAX_EXPRESSION = 1000
"""Characters of an expression."""
MAX_BITS = 4096
"""Bits of a whole number that an expression may reach."""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression, such as (2 + 3) * sqrt(16) / 7."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"want at most {MAX_EXPRESSION} characters")
    value = _value(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Any = value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _value(left), _value(right)
            if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
                raise ValueError("the result is too large")
            result = base**exponent
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*map(_value, arguments))
        case ast.Name(id=name) if name in _NAMES:
            result = _NAMES[name]
        case _:
            raise ValueError(f"want numbers, + - * / // % ^, parentheses and {', '.join(_FUNCTIONS)}")
    if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > MAX_BITS):
        raise ValueError("the result is too large or no real number")
    return result


MAX_OUTPUT_BYTES = 1 << 22
"""Limit of a program's output; the model is shown its beginning and end. A program that writes more is ended."""
MAX_REASON = 1000
"""Characters of a result that are kept for the end of a program."""
OUTCOMES = {
    "time": "the program was ended after {0.seconds:g} s",
    "output": "the program was ended after {0.output_bytes} bytes of output",
}
"""Ends of programs by the sandbox, in words."""


class Python:
    """Runs programs in the sandbox of the reward ``code``: no network, no processes, no files."""

    def __init__(self, seconds: float = 6.0, memory_mb: int = 1024) -> None:
        self._bounds = Bounds(seconds=seconds, memory_mb=memory_mb, output_bytes=MAX_OUTPUT_BYTES)

    def __call__(self, code: str) -> str:
        """Run a Python program, and return its output."""
        outcome = run(code, self._bounds)
        output = shortened(outcome.output, MAX_RESULT - MAX_REASON)
        reason = OUTCOMES.get(outcome.reason, outcome.reason).format(self._bounds)
        return f"{output}\n{FAILED} {reason}".strip() if reason else output


class TextSearch:
    """Searches a JSONL file of texts (``text``, perhaps ``title``) for texts that share a query's rarest words."""

    def __init__(self, path: str, results: int = 3) -> None:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        self._texts = [f"{row['title']}\n{row['text']}" if row.get("title") else str(row["text"]) for row in rows]
        self._words = [set(_words(text)) for text in self._texts]
        self._rows_of: Counter[str] = Counter(word for words in self._words for word in words)
        self._results = results

    def __call__(self, query: str) -> str:
        """Search for texts that answer a query."""
        query_words = set(_words(query))
        scores = [sum(1 / self._rows_of[word] for word in query_words & words) for words in self._words]
        best = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[: self._results]
        return "\n\n".join(self._texts[row] for row in best if scores[row]) or "Nothing found."


def _words(text: str) -> list[str]:
    return "".join(letter.lower() if letter.isalnum() else " " for letter in text).split()


_HERE = "tidemill.actors.episodes.programs.tools"
TABLE = {"calculator": f"{_HERE}:calculator", "python": f"{_HERE}:Python", "search": f"{_HERE}:TextSearch"}
"""Built-in tools."""
