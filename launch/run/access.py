"""Credentials of a process on the bus: put into its address; and the settings that it accepts from there.

A password comes from the environment, or from a file of the run; never from a command line, which all users of the
machine can read.
"""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus.client.addresses import Address, parse
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from tidemill.bus.keys import Keys

VIEWER, OPERATOR, LEARNER, SHADOW = "viewer", "operator", "learner", "shadow"
AUTH_DIR = "auth"
ALLOW_VARIABLE = "TIDEMILL_ALLOW"  # Variable with patterns, as --allow, separated by blanks
# Files in the same directory with the keys that HTTP requests to engines and routers of the run must have.
API_KEY_FILE, ADMIN_KEY_FILE = "api-key", "admin-key"

BUS_URL_FILE = "bus.url"  # File in the run's directory with the address of its embedded bus


def auth_dir(config: RunConfig) -> Path:
    """Return the directory of the run's files with its users' passwords."""
    return Path(config.bus.auth_dir) if config.bus.auth_dir else config.root / AUTH_DIR


def write_keys(directory: Path, keys: "Keys") -> None:
    """Write the keys for HTTP requests to the run's engines into files that their owner alone can read."""
    from tidemill.bus.system.files import write_whole

    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, key in ((API_KEY_FILE, keys.api), (ADMIN_KEY_FILE, keys.admin)):
        write_whole(directory / name, key + "\n", private=True)


def last_key(directory: Path) -> str:
    """Return the admin key in the run's files; empty when there is none."""
    file = directory / ADMIN_KEY_FILE
    return file.read_text().strip() if file.exists() else ""


def address_line(url: str, config: RunConfig | None, user: str, environment: Mapping[str, str]) -> str:
    """Return the address with user, password and certificates, for ``client.addresses``; not to be shown.

    The user is that of the environment; else, if the run's bus has users, ``user`` with the password in the run's
    files; else none. Raises ValueError for a ``url`` with a password in it.
    """
    settings, directory = {}, None
    if config is not None:
        settings, directory = vars(config.bus), auth_dir(config)
    return _line(url, settings, directory, user, environment)


def learner_user(config: RunConfig) -> str:
    """Return the user of the bus that a learner of this configuration is; a shadow has one of its own."""
    of = config.debug.shadow_of
    return f"{SHADOW}-{config.run.removeprefix(f'{of}-')}" if of else LEARNER


def viewer_line(
    url: str,
    environment: Mapping[str, str],
    root: Path | None = None,
    bus: JsonMapping | None = None,
    *,
    user: str = VIEWER,
) -> str:
    """Return the address for viewer or operator, as ``address_line``. ``bus``: that section of the configuration."""
    settings = bus or {}
    directory = None if root is None else Path(settings.get("auth_dir") or root / AUTH_DIR)
    return _line(url, settings, directory, user, environment)


def _line(url: str, bus: JsonMapping, directory: Path | None, user: str, environment: Mapping[str, str]) -> str:
    """Return the address. ``bus``: that section of the configuration; ``directory``: the run's users, if known."""
    address = parse(url)
    if address.password:
        raise ValueError(
            "--bus: want no password on the command line, where others on this machine can read it; "
            "set TIDEMILL_BUS_CREDENTIALS=FILE, or TIDEMILL_BUS_USER and TIDEMILL_BUS_PASSWORD"
        )
    name, password = user_of_environment(environment)
    if not name and directory is not None and bus.get("auth") and user:
        name, password = _user_of_run(directory, user)
    own = bus if bus.get("tls_verify") else {}  # a client needs a certificate only where the server asks for one
    return Address(
        servers=address.servers,
        user=name or address.user,
        password=password,
        ca=address.ca or bus.get("tls_ca", ""),
        cert=address.cert or own.get("tls_cert", ""),
        key=address.key or own.get("tls_key", ""),
    ).line()


def user_of_environment(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return (user, password), empty if the environment names none. Raises ValueError for one of both."""
    from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, PASSWORD_VARIABLE, USER_VARIABLE, read_credentials

    if file := environment.get(CREDENTIALS_VARIABLE):
        return read_credentials(Path(file))
    name, password = environment.get(USER_VARIABLE, ""), environment.get(PASSWORD_VARIABLE, "")
    if bool(name) != bool(password):
        raise ValueError(f"{USER_VARIABLE}, {PASSWORD_VARIABLE}: want both or none")
    return name, password


def allowed(patterns: Sequence[str], environment: Mapping[str, str], replaced: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the patterns of settings that may come from the bus though they name code or files of this machine.

    They are those of ``--allow`` and TIDEMILL_ALLOW (separated by blanks, quoted as in a shell). Settings with their
    paths in ``replaced`` are set on this machine: their values on the bus are not used, and so not refused.
    Raises ValueError for a pattern that fits no setting.
    """
    from tidemill.actors.guarded_settings import checked

    accepted = checked([*patterns, *shlex.split(environment.get(ALLOW_VARIABLE, ""))])
    return (*accepted, *(f"{path}[.=]*" for path in replaced))


def _user_of_run(directory: Path, user: str) -> tuple[str, str]:
    from tidemill.bus.server.auth import credentials_file, read_credentials

    file = credentials_file(directory, user)
    if not file.exists():
        raise ValueError(
            f"{file}: no such user of the bus; raise bus.auth_users, or give TIDEMILL_BUS_CREDENTIALS=FILE"
        )
    return read_credentials(file)


def own_address(config: RunConfig, url: str) -> str:
    """Return the address with the learner's password, for processes of the run's own machine that may do everything."""
    return address_line(url, config, LEARNER, os.environ)
