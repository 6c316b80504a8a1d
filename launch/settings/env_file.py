"""``.env`` beside a configuration: lines ``NAME=value`` with secrets, and no settings. A value is in no message."""

import re
import stat
from pathlib import Path

from tidemill.launch.settings.yaml_file import SettingsError

NAME = ".env"
SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "TIDEMILL_WEBHOOK",
    "TIDEMILL_METRICS_TOKEN",
)
PREFIX = "AWS_"  # Start of further names that are read: the credentials of an object store
_LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)", re.ASCII)
_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>[^"'\\]*)(?P=quote)\s*(?:\#.*)?|(?P<bare>[^\s"']*)(?:\s+\#.*)?""")
MOST_BYTES = 1 << 16


def read(file: Path) -> tuple[dict[str, str], str]:
    """Return the secrets of a file, none without one, and a warning if others may read it. Raises SettingsError."""
    if not file.is_file():
        return {}, ""
    try:
        mode = file.stat().st_mode
        if file.stat().st_size > MOST_BYTES:
            raise SettingsError(f"{file}: want at most {MOST_BYTES} bytes of NAME=value, got {file.stat().st_size}")
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise SettingsError(f"{file}: want a file that can be read, got {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file}: want text in UTF-8, got other bytes; save it again") from None
    others = mode & (stat.S_IRWXG | stat.S_IRWXO)
    warning = f"{file}: want a file that its owner alone can read, got mode {stat.S_IMODE(mode):o}; chmod 600 {file}"
    return _secrets(file, lines), warning if others else ""


def _secrets(file: Path, lines: list[str]) -> dict[str, str]:
    secrets = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        value = _VALUE.fullmatch(match["value"]) if match is not None else None
        if match is None or value is None or "\0" in line:
            got = "another line" if match is None else f"a value of {match['name']} with a blank or a part of a quote"
            raise SettingsError(f"{file}:{number}: want NAME=value, or NAME='value' with blanks in it, got {got}")
        if match["name"] in SECRETS or match["name"].startswith(PREFIX):
            secrets[match["name"]] = value["quoted"] if value["quote"] else value["bare"]
    return secrets
