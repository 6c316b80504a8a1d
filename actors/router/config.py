"""Settings of the router."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router."""

    host: str = "127.0.0.1"
    """Address to listen on; auto = that of the way to the bus. Others than loopback want a key of the run, which only a bus has."""
    advertise: str = ""
    """Host, or host:port, under which others find it, where that is not ``host``."""
    insecure: bool = False
    """Answer requests of other machines without a key."""
    port: int = 0
    """0 = any free one."""
    workers: tuple[str, ...] = ()
    """URLs of engines known from the start, besides those on the bus."""
    middleware: tuple[str, ...] = ()
    """``package.module:factory`` each, the first one outermost; ``factory(config)`` gives an ``actors.router.exchange.Middleware``."""
    model: str = ""
    """Directory of the model whose tokenizer and chat template the middleware uses."""
    timeout_s: float = 3600.0
    """A request, from its arrival to its last byte."""
    idle_s: float = 600.0
    """Between two chunks of an answer, and for a client to take one."""
    connect_s: float = 5.0
    wait_s: float = 60.0
    """A request waits so long for an engine that serves."""
    retries: int = 3
    """More attempts, each rather at another engine, where repeating is safe."""
    health_every_s: float = 1.0
    health_timeout_s: float = 5.0
    health_failures: int = 3
    """Checks in a row without an answer, after which an engine is left alone until it answers again."""
    max_sessions: int = 100_000
    """Sessions whose engine is remembered; the longest unused is forgotten first."""
    max_text: int = 64 << 20
    """Characters of prompts and responses that the token-exact middleware remembers."""
    max_body_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        for name in ("timeout_s", "idle_s", "connect_s", "wait_s", "health_every_s", "health_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name}: want > 0, got {getattr(self, name)!r}")
        for name in ("health_failures", "max_sessions", "max_text", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"router.{name}: want >= 1, got {getattr(self, name)!r}")
        if self.retries < 0:
            raise ValueError(f"router.retries: want >= 0, got {self.retries!r}")
        for url in self.workers:
            check_url(url)


def check_url(url: object) -> str:
    """An engine's address without a slash at its end. Raises ValueError."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        well = parts.scheme in ("http", "https") and parts.hostname and parts.hostname.encode("idna") and parts.port != 0
    except ValueError:  # no port, no address in brackets, a part of the name that is empty or too long
        well = False
    if not isinstance(url, str) or not well or not url.isprintable() or " " in url:
        raise ValueError(f"worker: want a URL like http://host:port, got {url!r}")
    return url.rstrip("/")
