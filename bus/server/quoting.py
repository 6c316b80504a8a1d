"""Text in the configuration of nats-server: strings like JSON's, but without ``\\uXXXX``, so letters stand as they
are.
"""

from collections.abc import Iterable

from tidemill.bus.config import UNQUOTABLE
from tidemill.bus.errors import Unquotable


def quoted(text: str) -> str:
    """Return the text as a string of the configuration. Raises Unquotable for control characters and for names that are
    no UTF-8.
    """
    if (odd := UNQUOTABLE.search(text)) is not None:
        raise Unquotable(text, odd[0])
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def quoted_list(texts: Iterable[str]) -> str:
    """Return the texts as a list of strings, on one line."""
    return f"[{', '.join(map(quoted, texts))}]"
