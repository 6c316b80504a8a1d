"""Settings of the router."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.bus.section import NotNegative, Positive, PositiveFloat, section


@section
@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router."""

    host: str = "127.0.0.1"
    """Address to listen on; auto = the address of the interface that leads to the bus. Any address but loopback
    requires a key of the run, and so a bus.
    """
    advertise: str = ""
    """Host, or host:port, at which other processes reach it, where that is not ``host``."""
    insecure: bool = False
    """Answer other machines without a key; without a bus, obey ``/add_worker`` and ``/remove_worker`` too."""
    port: int = 0
    """0 = any free one."""
    workers: tuple[str, ...] = ()
    """URLs of engines known from the start, besides those on the bus."""
    middleware: tuple[str, ...] = ()
    """``package.module:factory`` each, outermost first; ``factory(config)`` returns a ``exchange.Middleware``."""
    model: str = ""
    """Directory of the model with the tokenizer and the chat template that the middleware uses."""
    timeout_s: PositiveFloat = 3600.0
    """Time limit of a request, from its arrival to the last byte of its answer."""
    idle_s: PositiveFloat = 600.0
    """Time limit between two chunks of an answer, and for a client to accept one."""
    connect_s: PositiveFloat = 5.0
    """Time limit of a connection to an engine."""
    wait_s: PositiveFloat = 60.0
    """Longest wait of a request for an engine that serves."""
    retries: NotNegative = 3
    """Further attempts at a request that can be repeated safely, each at another engine if there is one."""
    health_every_s: PositiveFloat = 1.0
    """Interval of the health checks of an engine."""
    health_timeout_s: PositiveFloat = 5.0
    """Time limit of one health check."""
    health_failures: Positive = 3
    """Health checks in a row without an answer after which an engine gets no requests until it answers again."""
    max_sessions: Positive = 100_000
    """Maximum number of sessions with a remembered engine; the sessions unused for longest are evicted first."""
    max_text: Positive = 64 << 20
    """Maximum number of characters and tokens of prompts and responses that the token-exact middleware remembers."""
    paths: tuple[str, ...] = ()
    """Further paths that are forwarded, for a middleware or other engines; a part in braces stands for any name."""
    max_body_bytes: Positive = 64 << 20
    """Maximum size in bytes of a request's body."""

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.startswith("/"):
                raise ValueError(f"paths: want paths that begin with /, got {path!r}")
        for url in self.workers:
            check_url(url)


def check_url(url: object) -> str:
    """Return an engine's URL without a slash at its end. Raises ValueError unless it is http or https, with a host."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        name = (parts.hostname or "").encode("idna")
        is_valid = parts.scheme in ("http", "https") and name and parts.port != 0
    except ValueError:  # no port, no address in brackets, a part of the name that is empty or too long
        is_valid = False
    if not isinstance(url, str) or not is_valid or not url.isprintable() or " " in url:
        raise ValueError(f"worker: want a URL like http://host:port, got {url!r}")
    return url.rstrip("/")
