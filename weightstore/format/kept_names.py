"""Names of a model's files that the library transformers does not write."""

from collections.abc import Callable, Collection, Iterable


def kept_names(
    names: Iterable[str], stored: Collection[str], renamed: Callable[[str], Collection[str]]
) -> frozenset[str]:
    """Return the names in memory that the files have, too (``stored``), and that the library would rename all the same
    (``renamed``). Its renaming of the experts' module, reversed, takes the dense layers of kimi_linear for experts.
    """
    return frozenset(name for name in names if name in stored and not all(other in stored for other in renamed(name)))
