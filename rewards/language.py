"""Language of a text, by the library langdetect (extra ``language``), which IFEval uses; with a fixed seed: a text has one language.

Its profiles of 55 languages are loaded with this module (0.3 s, where the library is installed), which the keeper of the child processes
imports before the first sample: none waits for them. A call reads 10,000 characters at most, and takes up to 40 ms.
"""

from importlib.util import find_spec
from typing import Any

NEEDED = "needs the library langdetect: pip install 'tidemill[language]' (from a checkout: pip install '.[language]')"
SEED = 0


def _profiles() -> Any:
    """Return the library's factory of detectors, one of this module's own; None where the library is not installed."""
    if find_spec("langdetect") is None:
        return None
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = SEED
    return factory


_FACTORY = _profiles()


def written_in(text: str, language: str) -> bool:
    """Return whether a text is written in a language, by its code (``de``, ``zh-cn``); True for a text without letters, as in IFEval.

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
