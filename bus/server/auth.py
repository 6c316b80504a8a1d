"""Users of the embedded server, each with a password and the permissions of its role. Knows files, no connection.

Every process has a user of its own name, so that the server tells one actor's samples and rows from another's. The
streams are in the learner's account. Every other user is in an account of its own, which imports the subjects of its
role: in the learner's it could name any subject of the run as reply subject, and the server would write there.
"""

import ctypes
import ctypes.util
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.client.layout import stream_configs
from tidemill.bus.config import BusConfig, quoted, quoted_list
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire import subjects
from tidemill.bus.wire.subjects import Shards

ACCOUNT = "TIDEMILL"  # Account of the learner and the streams. Data made without users is in ``NO_ACCOUNT``.
NO_ACCOUNT = "$G"
POOLS = ("actor", "engine", "scorer", "host")
LEARNER, VIEWER, OPERATOR, ROUTER = "learner", "viewer", "operator", "router"
SINGLE = (LEARNER, VIEWER, OPERATOR, ROUTER)  # Roles with one user of the same name
SHADOW = "shadow"  # Role of a shadow learner, whose user has its name: shadow-NAME
USER_VARIABLE, PASSWORD_VARIABLE = "TIDEMILL_BUS_USER", "TIDEMILL_BUS_PASSWORD"
# Environment variable with the path of a file that sets the other two
CREDENTIALS_VARIABLE = "TIDEMILL_BUS_CREDENTIALS"
USERS_FILE = "users.json"
SERVER_FILE = "users.conf"
_ROUTES = "routes"  # Login of the servers of a cluster to each other; no process has it
# Requests with several answers, by readers: the server keeps their reply subjects until they are unsubscribed
_MANY_ANSWERS = re.compile(r"\$JS\.API\.CONSUMER\.MSG\.NEXT\..*\.\*")
_PUBLIC_BUCKETS = tuple(bucket for bucket in subjects.BUCKETS if bucket not in subjects.SECRET_BUCKETS)
_PASSWORD_BYTES = 24
_BCRYPT = "$2a$04$"  # The lowest cost: 192 random bits cannot be guessed at any speed
_SALT = "./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Subjects a user may publish and subscribe to; all others are refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    inbox: str
    """Filter of the subjects on which its answers arrive."""
    denied: tuple[str, ...] = ()
    """Subjects that it may not publish to although ``publish`` covers them."""
    answers: bool = False
    """It may also answer each request that it receives, once."""


def permissions(role: str, name: str, run: str, config: BusConfig) -> Permissions:
    """Return the permissions of a process of this role and name. Raises ValueError for an unknown role."""
    rights = _Rights(run, config, subjects.token(name))
    if role not in (*SINGLE, *POOLS, SHADOW):
        raise ValueError(f"role: want one of {', '.join((*SINGLE, *POOLS, SHADOW))}, got {role!r}")
    publish, subscribe, denied = getattr(rights, role)()
    return Permissions(
        publish=tuple(dict.fromkeys(publish)),
        subscribe=tuple(subscribe),
        inbox=f"{subjects.inbox_prefix(name)}.>",
        denied=tuple(denied),
        answers=role == LEARNER,
    )


_Lists = tuple[list[str], list[str], list[str]]


class _Rights:
    """(publish, subscribe, denied) of every role. No role subscribes to subjects it writes: a cycle."""

    def __init__(self, run: str, config: BusConfig, name: str) -> None:
        self._run, self._name, self._config, self._rollouts = run, name, config, config.rollouts
        self._streams = [str(stream["name"]) for stream in stream_configs(run, config)]
        self._tasks, self._shards = subjects.stream(run, subjects.TASKS), Shards(config.sample_shards)
        self._rows_of = {bucket: subjects.row(run, bucket, ">") for bucket in subjects.BUCKETS}

    def learner(self) -> _Lists:
        """All rights on its run."""
        run = [subjects.everything(self._run), *self._rows_of.values()]
        api = [_api("INFO"), _api("STREAM.NAMES")]
        for stream in self._streams:
            api += [_api(f"STREAM.{verb}.{stream}") for verb in ("CREATE", "UPDATE", "INFO", "PURGE", "MSG.GET")]
            api += [_api(f"CONSUMER.{verb}.{stream}.>") for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")]
            api.append(f"$JS.ACK.{stream}.>")
        for name in (subjects.PARTIALS, subjects.TURNS, subjects.DEAD):  # where any actor writes any task's subject
            if (stream := subjects.stream(self._run, name)) in self._streams:
                api.append(_api(f"STREAM.MSG.DELETE.{stream}"))
        for shadow in map(self._of_shadow, self._config.auth_shadows):
            api += [_api(f"STREAM.{verb}.{name}") for verb in ("CREATE", "UPDATE", "INFO") for name in shadow._streams]
        return [*run, *api], [*run, *subjects.acks(self._run, self._rollouts)], []

    def shadow(self) -> _Lists:
        """Permissions to read plans, samples and tasks of the run, and to write to the streams of its own name.

        The learner makes these streams. A user that may create or change a stream could name secret rows as its source,
        and have the server publish messages as plans of the run.
        """
        own = self._of_shadow(self._name.removeprefix(f"{SHADOW}-"))
        publish = [subjects.everything(own._run), *own._rows_of.values(), _api("INFO"), _api("STREAM.NAMES")]
        publish += [_api(f"STREAM.PURGE.{stream}") for stream in own._streams]
        of_run = [stream for stream in self._streams if not stream.startswith("KV_")]
        publish += _read_from([*of_run, *own._streams])
        return publish, [], self._queue_requests("CREATE", "MSG.NEXT")

    def _of_shadow(self, name: str) -> "_Rights":
        return _Rights(f"{self._run}-{name}", self._config, self._name)

    def _queue_requests(self, *verbs: str) -> list[str]:
        """Return requests to the consumers of tasks."""
        queues = [f"{self._tasks}.{queue}" for queue in subjects.queues(self._rollouts).values()]
        return [_api(f"CONSUMER.{verb}.{queue}") for verb in verbs for queue in queues]

    def _public_streams(self) -> list[str]:
        secret = [subjects.bucket_stream(self._run, bucket) for bucket in subjects.SECRET_BUCKETS]
        return [stream for stream in self._streams if stream not in secret]

    def actor(self) -> _Lists:
        """Leases and settles tasks; stores samples under its own name, parts, partials, reports of failures."""
        publish = [
            *self._samples(),
            subjects.partial(self._run),
            *([subjects.turn(self._run)] if self._rollouts else []),
            *(_api(f"STREAM.{verb}.{subjects.stream(self._run, subjects.PARTIALS)}") for verb in ("INFO", "MSG.GET")),
            *([_api(f"STREAM.MSG.GET.{subjects.stream(self._run, subjects.TURNS)}")] if self._rollouts else []),
            subjects.dead(self._run, "report"),
            subjects.dead(self._run, "task"),
            _api(f"STREAM.INFO.{subjects.stream(self._run, subjects.DEAD)}"),
            _api(f"STREAM.MSG.GET.{self._tasks}"),
            _api(f"DIRECT.GET.{self._tasks}"),
        ]
        for consumer in subjects.queues(self._rollouts).values():
            publish += [_api(f"CONSUMER.MSG.NEXT.{self._tasks}.{consumer}"), f"$JS.ACK.{self._tasks}.{consumer}.>"]
        return [*publish, *self._member("actor")], self._subscriptions(live=("engine", "scorer"), weights=(">",)), []

    def _samples(self) -> Iterator[str]:
        """Yield the subjects of its own samples, their manifests and parts, in every shard."""
        for shard in range(self._shards.count):
            suffix = self._shards.suffix(shard)
            samples = subjects.samples_of(self._run, self._name, suffix)
            yield from (samples, subjects.manifest(samples), subjects.part(self._run, "*", "*", suffix))

    def engine(self) -> _Lists:
        """Reads the versions of the weights, and requests snapshots of them."""
        want = subjects.row(self._run, "weights", "want")
        publish = [want, *self._member("engine"), *self._reading(subjects.SECRET_BUCKETS)]
        return publish, self._subscriptions(weights=("head", "snapshot")), []

    def scorer(self) -> _Lists:
        """Computes rewards for actors, which call it: it needs the run's configuration and api key alone."""
        return list(self._member("scorer")), self._subscriptions(), []

    def host(self) -> _Lists:
        """Runs the actors, engines and scorers of its machine: reads the desired numbers of processes."""
        return list(self._member("host")), self._subscriptions(), []

    def router(self) -> _Lists:
        """Reads the addresses of the engines; commands to it require the same key as those to engines."""
        publish = [*self._member("router"), *self._reading(subjects.SECRET_BUCKETS)]
        return publish, self._subscriptions(live=("engine",)), []

    def viewer(self) -> _Lists:
        """Reads everything but secret rows, by consumers of its own; it may not touch the consumers of tasks."""
        publish = [subjects.full(self._run), _api("INFO"), _api("STREAM.NAMES")]
        shadows = [self._of_shadow(name) for name in self._config.auth_shadows]
        publish += _read_from([stream for run in (self, *shadows) for stream in run._public_streams()])
        publish += self._queue_requests("INFO")
        denied = self._queue_requests("CREATE", "MSG.NEXT")
        return publish, [*(self._rows_of[bucket] for bucket in _PUBLIC_BUCKETS), subjects.metric(self._run)], denied

    def operator(self) -> _Lists:
        """Reads everything, sets the desired numbers of processes, decides on dead tasks, and registers readers."""
        publish, subscribe, denied = self.viewer()
        cursors, decisions = subjects.row(self._run, "run", "cursor.*"), subjects.dead(self._run, "word")
        publish = [self._rows_of["wanted"], cursors, decisions, *publish]
        written = (self._rows_of["wanted"], self._rows_of["run"])
        return publish, [subject for subject in subscribe if subject not in written], denied

    def _member(self, role: str) -> Iterator[str]:
        """Yield the subjects of its own live row and metrics, and those to read every bucket but the secret ones."""
        yield subjects.row(self._run, "live", f"{role}.{self._name}")
        yield subjects.metric(self._run)
        yield subjects.full(self._run)
        yield _api("INFO")  # an account that does not import this gets a JetStream API of its own, without streams
        yield _api("STREAM.NAMES")
        yield from self._reading(_PUBLIC_BUCKETS)

    def _reading(self, buckets: Sequence[str]) -> Iterator[str]:
        """Yield the subjects that read single rows."""
        for bucket in buckets:
            stream = subjects.bucket_stream(self._run, bucket)
            yield _api(f"STREAM.INFO.{stream}")
            yield _api(f"STREAM.MSG.GET.{stream}")
            yield _api(f"DIRECT.GET.{stream}")

    def _subscriptions(self, *, live: Sequence[str] = (), weights: Sequence[str] = ()) -> list[str]:
        """Return the subjects of row changes: live rows of some roles, some keys of weights, all of run and wanted."""
        rows = [subjects.row(self._run, "live", f"{role}.*") for role in live]
        rows += [subjects.row(self._run, "weights", key) for key in weights]
        return [*rows, self._rows_of["run"], self._rows_of["wanted"]]


def _read_from(streams: Iterable[str]) -> Iterator[str]:
    """Yield the subjects that read streams by consumers of the reader's own."""
    for stream in streams:
        yield from (_api(f"{verb}.{stream}") for verb in ("STREAM.INFO", "STREAM.MSG.GET"))
        yield from (_api(f"CONSUMER.{verb}.{stream}.*") for verb in ("CREATE", "MSG.NEXT"))


def _api(verb: str) -> str:
    return f"$JS.API.{verb}"


# ---- passwords and files


def make_users(directory: Path, run: str, config: BusConfig) -> list[str]:
    """Return lines of the server's configuration. Makes the missing users, each with a private file ``<user>.env``.

    Users that exist keep their passwords, so that running processes can still connect.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    roles = {
        **{role: role for role in SINGLE},
        **{f"{role}-{number}": role for role in POOLS for number in range(config.auth_users)},
        **{f"{SHADOW}-{name}": SHADOW for name in config.auth_shadows},
    }
    file = directory / USERS_FILE
    hashes: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    for user in roles:
        if user not in hashes or not credentials_file(directory, user).exists():
            hashes[user] = _new_user(directory, user)
    hashes.setdefault(_ROUTES, secrets.token_urlsafe(_PASSWORD_BYTES))
    write_whole(file, json.dumps(hashes, indent=1) + "\n", private=True)
    allowed = {user: permissions(role, user, run, config) for user, role in roles.items()}
    lines = ["accounts {", *_account_lines(allowed, hashes), "}"]
    write_whole(directory / SERVER_FILE, "\n".join(lines) + "\n", private=True)
    return lines


def viewer_alone(password: str, run: str, config: BusConfig) -> list[str]:
    """Return the lines of a server with the viewer as its only user; no lines without a password."""
    if not password:
        return []
    return ["authorization {", *_user_lines(VIEWER, password, permissions(VIEWER, VIEWER, run, config)), "}"]


def route_password(directory: Path) -> str:
    """Return the password between the servers of a cluster; ``make_users`` made it."""
    return str(json.loads((directory / USERS_FILE).read_text())[_ROUTES])


def credentials_file(directory: Path, user: str) -> Path:
    """Return the path of the file with the login of a user, as ``read_credentials`` reads it."""
    return directory / f"{user}.env"


def read_credentials(file: Path) -> tuple[str, str]:
    """Return (user, password) of a file with lines ``NAME=value``. Raises ValueError naming only the file."""
    try:
        pairs = dict(line.strip().partition("=")[::2] for line in file.read_text().splitlines() if "=" in line)
    except OSError as error:
        raise ValueError(f"{file}: want the credentials of a bus user: {error.strerror}") from None
    if not pairs.get(USER_VARIABLE) or not pairs.get(PASSWORD_VARIABLE):
        raise ValueError(f"{file}: want lines {USER_VARIABLE}=... and {PASSWORD_VARIABLE}=...")
    return pairs[USER_VARIABLE], pairs[PASSWORD_VARIABLE]


def _new_user(directory: Path, user: str) -> str:
    """Write the file with a new password, and return its hash for the server (where this system has bcrypt)."""
    password = secrets.token_urlsafe(_PASSWORD_BYTES)
    lines = f"{USER_VARIABLE}={user}\n{PASSWORD_VARIABLE}={password}\n"
    write_whole(credentials_file(directory, user), lines, private=True)
    return _hashed(password)


def _hashed(password: str) -> str:
    """Return the bcrypt hash of the C library, or where it has none the password itself."""
    libcrypt = ctypes.util.find_library("crypt")
    if libcrypt is None:
        return password
    crypt = ctypes.CDLL(libcrypt).crypt
    crypt.restype = ctypes.c_char_p
    salt = "".join(secrets.choice(_SALT) for _ in range(21)) + "."
    hashed: bytes | None = crypt(password.encode(), f"{_BCRYPT}{salt}".encode())
    is_bcrypt = hashed is not None and hashed.startswith(_BCRYPT.encode()) and len(hashed) == 60
    return hashed.decode() if hashed is not None and is_bcrypt else password


def _account_lines(allowed: Mapping[str, Permissions], passwords: Mapping[str, str]) -> Iterator[str]:
    members = {user: rights for user, rights in allowed.items() if user != LEARNER}
    services = sorted({subject for rights in members.values() for subject in rights.publish})
    streams = sorted({subject for rights in members.values() for subject in rights.subscribe})
    yield from (f"  {ACCOUNT} {{", "    jetstream: enabled", "    exports: [")
    for subject in services:
        answers = "stream" if _MANY_ANSWERS.fullmatch(subject) else "singleton"
        yield f"      {{ service: {quoted(subject)}, response_type: {answers} }}"
    yield from (f"      {{ stream: {quoted(subject)} }}" for subject in streams)
    yield "    ]"
    yield from _user_lines(LEARNER, passwords[LEARNER], allowed[LEARNER])
    yield "  }"
    for user, rights in members.items():
        yield from (f"  {quoted(user)} {{", "    imports: [")
        for kind, imported in (("service", rights.publish), ("stream", rights.subscribe)):
            for subject in imported:
                yield f"      {{ {kind}: {{ account: {ACCOUNT}, subject: {quoted(subject)} }} }}"
        yield "    ]"
        yield from _user_lines(user, passwords[user], rights)
        yield "  }"


def _user_lines(user: str, password: str, allowed: Permissions) -> Iterator[str]:
    subscribe = [allowed.inbox, *allowed.subscribe]
    deny = f", deny: {quoted_list(allowed.denied)}" if allowed.denied else ""
    yield from ("    users: [{", f"      user: {quoted(user)}", f"      password: {quoted(password)}")
    yield "      permissions {"
    yield f"        publish {{ allow: {quoted_list(allowed.publish)}{deny} }}"
    yield f"        subscribe {{ allow: {quoted_list(subscribe)} }}"
    if allowed.answers:
        yield "        allow_responses: true"
    yield from ("      }", "    }]")
