"""Errors of the hub: what ``huggingface_hub`` and HTTP raise becomes ``HubRefused``, whose text holds no token."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError
from tidemill.launch.settings.hub_names import DATASET, cache

HUB = "https://huggingface.co"
WAY_OUT = "give a path, set HF_ENDPOINT to a mirror, or fill the cache where the hub can be reached (HF_HOME)"
TOKEN = "set HF_TOKEN in the environment or in .env beside the configuration"


class HubRefused(DetailedError, ValueError):
    """A name of a repository cannot be used, or the hub cannot be reached."""

    exit_code = exit_codes.CONFIG
    where: str
    want: str
    got: str
    cure: str
    template = "{where}: want {want}, got {got}; {cure}"


class HubUnreachable(HubRefused):
    """The hub gives no answer, or offline mode is on."""


@contextmanager
def explained(where: str, repo: str, kind: str, *, uploads: bool = False) -> Iterator[None]:
    """Raise HubRefused in place of the library's errors, with the setting or option at ``where``.

    ``uploads``: the repository is written to.
    """
    from httpx2 import HTTPError, InvalidURL
    from huggingface_hub import errors

    path = "a path of prompts" if kind == DATASET else "a directory with a Hugging Face model"
    what = "a repository of the hub to write to" if uploads else f"{path}, or a repository of the hub"
    shown = repo if uploads else f"{repo}, which is no path here,"
    way_out = "set HF_ENDPOINT to a hub that can be reached" if uploads else WAY_OUT
    try:
        if is_offline():
            raise errors.OfflineModeIsEnabled
        yield
    except HubRefused:
        raise
    except errors.GatedRepoError:
        cure = f"accept its conditions on its page with an account, and {TOKEN}"
        raise HubRefused(where, what, f"{repo}, which is gated", cure) from None
    except errors.RevisionNotFoundError:
        raise HubRefused(where, what, f"{repo} without such a revision", "name a branch, tag or commit") from None
    except errors.RepositoryNotFoundError:
        got = f"{repo}, which is no path here, and missing on {shown_endpoint()} or private"
        raise HubRefused(where, what, got, f"fix it; for a private repository {TOKEN}") from None
    except errors.HFValidationError:
        raise HubRefused(where, what, f"{repo}, which is neither", "fix it") from None
    except errors.OfflineModeIsEnabled:
        got, cure = f"{shown} and not in {cache()}, in offline mode", way_out
        if uploads:
            got, cure = f"{repo} in offline mode", "unset HF_HUB_OFFLINE"
        raise HubUnreachable(where, what, got, cure) from None
    except errors.HfHubHTTPError as error:
        raise _of_status(where, what, repo, error.response.status_code, way_out) from None
    except (HTTPError, OSError, RuntimeError) as error:
        raise _of_failure(where, what, repo, error, shown, way_out) from None
    except (InvalidURL, ValueError, TypeError, LookupError, AttributeError) as error:  # the library reads an answer
        got = f"{shown} and an answer of {shown_endpoint()} as no hub gives it ({type(error).__name__})"
        raise HubRefused(where, what, got, way_out) from error


def endpoint() -> str:
    """Return the address of the hub, or of its mirror (HF_ENDPOINT). Raises HubRefused for none of HTTP."""
    address = os.environ.get("HF_ENDPOINT") or HUB
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        is_address = False
    if not is_address or not address.isprintable() or " " in address:
        cure = f"fix it, or unset it for {HUB}"
        raise HubRefused("HF_ENDPOINT", "http://HOST[:PORT] or https://HOST[:PORT]", ascii(_shown(address)), cure)
    return address.rstrip("/")


def shown_endpoint() -> str:
    """Return the address of the hub without the user and the password that it may have."""
    return _shown(endpoint())


def _shown(address: str) -> str:
    return re.sub(r"^(\w*:/+)?.*@", r"\1", address)


def is_offline() -> bool:
    """Return whether the cache alone may be used (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    is_set = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    return is_set or bool(constants.HF_HUB_OFFLINE)


def _of_failure(where: str, what: str, repo: str, error: Exception, shown: str, way_out: str) -> HubRefused:
    # An OSError of the file system has a number. Errors of the library and of hf_xet, which transfers large files,
    # have none. hf_xet raises RuntimeError too where a connection fails.
    if isinstance(error, OSError) and error.errno is not None:
        got = f"{error.filename or cache()}: {error.strerror}"
        return HubRefused(where, f"a cache that can be written for {repo}", got, "set HF_HOME")
    got = f"{shown} and no answer of {shown_endpoint()} ({type(error.__cause__ or error).__name__})"
    return HubUnreachable(where, what, got, way_out)


def _of_status(where: str, what: str, repo: str, status: int, way_out: str) -> HubRefused:
    got = f"status {status} of {shown_endpoint()} for {repo}"
    if status in (401, 403):
        return HubRefused(where, what, f"{got}: the token is wrong, or lacks the right", TOKEN)
    return (HubUnreachable if status >= 500 or status == 429 else HubRefused)(where, what, got, way_out)
