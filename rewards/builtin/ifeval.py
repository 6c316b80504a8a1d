"""Reward for instructions that a program can verify: IFEval's, and IFBench's (``tidemill.rewards.builtin.ifbench``).

Source: IFEval (Zhou et al. 2023, arXiv 2311.07911), its instruction ids and arguments: data sets in that format can be
used unchanged. ``english_*`` checks the case only, and sentences end at ``.``, ``!`` or ``?`` (the original uses nltk).
``language:response_language`` needs langdetect (extra ``language``). Its profiles are loaded with this module (0.3 s),
which the keeper of the child processes imports before the first sample. A call takes up to 40 ms.
"""

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.builtin import ifbench
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++(?=\s|$)")
_HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
_BULLET = re.compile(r"^[ \t]*(?:\*[^*]|-)", re.MULTILINE)
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s", "P.P.S.": r"p\.\s?p\.\s?s"}
_WORD = re.compile(r"\w+")

Check = Callable[[str, JsonMapping], bool]
NEEDED = "needs the library langdetect: pip install 'tidemill[language]' (from a checkout: pip install '.[language]')"
LANGUAGE_SEED = 0  # A fixed one, so that a text has one language


def ifeval(request: RewardRequest, *, share: bool = False) -> dict[str, float]:
    """Return ``followed``, the share of instructions that are followed, and ``score``: with ``share`` the same, else 1
    for all.

    The metadata, or a label that is a map, has ``instruction_id_list`` and ``kwargs``, one map for each instruction. An
    empty response follows none. Raises RewardFailed for an unknown instruction, or arguments that are missing.
    """
    instructions: JsonMapping = request.label if isinstance(request.label, Mapping) else request.metadata
    names, arguments = instructions.get("instruction_id_list"), instructions.get("kwargs")
    if not isinstance(names, (list, tuple)) or not names:
        want = "a list under instruction_id_list in metadata or label"
        raise RewardFailed("ifeval", f"want {want}, got keys {sorted(map(str, instructions))}")
    if not isinstance(arguments, (list, tuple)) or len(arguments) != len(names):
        raise RewardFailed("ifeval", f"want a list of {len(names)} maps under kwargs, one for each instruction")
    pairs = zip(names, arguments, strict=True)
    followed = sum(follows(str(name), values or {}, request.response) for name, values in pairs) / len(names)
    return {"score": followed if share else float(followed == 1), "followed": followed}


def follows(name: str, arguments: JsonMapping, response: str) -> bool:
    """Return whether a response follows one instruction. Raises RewardFailed."""
    check = INSTRUCTIONS.get(name) or ifbench.INSTRUCTIONS.get(name)
    if check is None:
        names = ", ".join(sorted(INSTRUCTIONS.keys() | ifbench.INSTRUCTIONS.keys()))
        raise RewardFailed("ifeval", f"instruction {name!r} is not supported; there are {names}")
    if not isinstance(arguments, Mapping):
        raise RewardFailed("ifeval", f"instruction {name!r}: want a map of arguments, got {arguments!r}"[:500])
    try:
        return bool(response.strip()) and check(response, arguments)
    except ModuleNotFoundError as error:
        raise RewardFailed("ifeval", f"instruction {name!r} {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"instruction {name!r} with {dict(arguments)!r}: {type(error).__name__}: {error}"
        raise RewardFailed("ifeval", reason[:500]) from None


def _compared(count: int, relation: str, bound: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"want the relation 'less than' or 'at least', got {relation!r}")
    return count < int(bound) if relation == "less than" else count >= int(bound)


def _occurs(word: str, text: str) -> bool:
    return str(word).lower() in text.lower()


def _count(word: str, text: str) -> int:
    return text.lower().count(str(word).lower())


def _has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(str(word))}\b", text, re.IGNORECASE) is not None


def _letter(text: str, arguments: JsonMapping) -> bool:
    return _compared(_count(arguments["letter"], text), arguments["let_relation"], arguments["let_frequency"])


def _paragraph_begins(text: str, arguments: JsonMapping) -> bool:
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    nth = int(arguments["nth_paragraph"])
    if len(paragraphs) != int(arguments["num_paragraphs"]) or not 1 <= nth <= len(paragraphs):
        return False
    first = paragraphs[nth - 1].split()[0].strip("'\".,?!\u201c\u201d").lower()
    return first == str(arguments["first_word"]).lower()


def _paragraphs(text: str, arguments: JsonMapping) -> bool:
    parts = text.split("***")
    inner = [part for place, part in enumerate(parts) if part.strip() or place not in (0, len(parts) - 1)]
    return all(part.strip() for part in inner) and len(inner) == int(arguments["num_paragraphs"])


def _json(text: str, arguments: JsonMapping) -> bool:
    plain = text.strip()
    if plain.startswith("```"):
        plain = plain.partition("\n")[2].removesuffix("```")
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, arguments: JsonMapping) -> bool:
    return any(part.partition(">>")[1] and part.partition(">>")[0].strip("<> \n") for part in text.split("<<")[1:])


def _postscript(text: str, arguments: JsonMapping) -> bool:
    marker = str(arguments["postscript_marker"]).strip()
    return re.search(_POSTSCRIPTS.get(marker.upper()) or re.escape(marker.lower()), text.lower()) is not None


def _two_responses(text: str, arguments: JsonMapping) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = [part for place, part in enumerate(parts) if part or place not in (0, len(parts) - 1)]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _sections(text: str, arguments: JsonMapping) -> bool:
    splitter = str(arguments["section_spliter"]).strip()
    return len(re.findall(rf"{re.escape(splitter)}\s{{0,3}}\d", text)) >= int(arguments["num_sections"])


def _capitals(text: str, arguments: JsonMapping) -> bool:
    count = sum(word.isupper() for word in _WORD.findall(text))
    return _compared(count, arguments["capital_relation"], arguments["capital_frequency"])


def _highlights(text: str, arguments: JsonMapping) -> bool:
    return sum(bool(part.strip("* ")) for part in _HIGHLIGHT.findall(text)) >= int(arguments["num_highlights"])


def _quoted(text: str, arguments: JsonMapping) -> bool:
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


INSTRUCTIONS: dict[str, Check] = {
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda text, arguments: text.isupper(),
    "change_case:english_lowercase": lambda text, arguments: text.islower(),
    "combination:repeat_prompt": lambda text, arguments: (
        text.strip().lower().startswith(str(arguments["prompt_to_repeat"]).strip().lower())
    ),
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": lambda text, arguments: (
        len(re.findall(r"\[[^\[\]]*\]", text)) >= int(arguments["num_placeholders"])
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": lambda text, arguments: any(answer in text for answer in _ANSWERS),
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": lambda text, arguments: (
        len(_BULLET.findall(text)) == int(arguments["num_bullets"])
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": lambda text, arguments: all(_occurs(word, text) for word in arguments["keywords"]),
    "keywords:forbidden_words": lambda text, arguments: (
        not any(_has_word(word, text) for word in arguments["forbidden_words"])
    ),
    "keywords:frequency": lambda text, arguments: _compared(
        _count(arguments["keyword"], text), arguments["relation"], arguments["frequency"]
    ),
    "keywords:letter_frequency": _letter,
    "language:response_language": lambda text, arguments: written_in(text, arguments["language"]),
    "length_constraints:nth_paragraph_first_word": _paragraph_begins,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": lambda text, arguments: _compared(
        len(_SENTENCE_END.findall(text)), arguments["relation"], arguments["num_sentences"]
    ),
    "length_constraints:number_words": lambda text, arguments: _compared(
        len(_WORD.findall(text)), arguments["relation"], arguments["num_words"]
    ),
    "punctuation:no_comma": lambda text, arguments: "," not in text,
    "startend:end_checker": lambda text, arguments: (
        text.strip().strip('"').lower().endswith(str(arguments["end_phrase"]).strip().lower())
    ),
    "startend:quotation": _quoted,
}


# ---- the language of a text


def _profiles() -> Any:
    """Return the library's factory of detectors, one of this module's own; None where the library is not installed."""
    if find_spec("langdetect") is None:
        return None
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = LANGUAGE_SEED
    return factory


_FACTORY = _profiles()


def written_in(text: str, language: str) -> bool:
    """Return whether a text is written in a language, by its code (``de``, ``zh-cn``); True for one without letters.

    Raises ModuleNotFoundError without the library, ValueError for a code that it does not have.
    """
    if _FACTORY is None:
        raise ModuleNotFoundError(NEEDED, name="langdetect")
    if language not in _FACTORY.langlist:
        raise ValueError(f"language: want one of {', '.join(sorted(_FACTORY.langlist))}, got {language!r}")
    from langdetect.lang_detect_exception import LangDetectException

    detector = _FACTORY.create()
    detector.append(text)
    try:
        return bool(detector.detect() == language)
    except LangDetectException:  # a text without letters has no language to find
        return True
