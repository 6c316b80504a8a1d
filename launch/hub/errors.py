"""Errors of the hub: what ``huggingface_hub`` and HTTP raise becomes ``HubRefused``, whose text holds no token."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError
from tidemill.launch.settings.hub_names import DATASET, cache

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
def explained(where: str, repo: str, kind: str) -> Iterator[None]:
    """Raise HubRefused in place of the library's errors, with the setting or option at ``where``."""
    from httpx2 import HTTPError
    from huggingface_hub import errors

    path = "a path of prompts" if kind == DATASET else "a directory with a Hugging Face model"
    what = f"{path}, or a repository of the hub"
    try:
        if is_offline():
            raise errors.OfflineModeIsEnabled
        yield
    except errors.GatedRepoError:
        cure = f"accept its conditions on its page with an account, and {TOKEN}"
        raise HubRefused(where, what, f"{repo}, which is gated", cure) from None
    except errors.RevisionNotFoundError:
        raise HubRefused(where, what, f"{repo} without such a revision", "name a branch, tag or commit") from None
    except errors.RepositoryNotFoundError:
        got = f"{repo}, which is no path here, and missing on {endpoint()} or private"
        raise HubRefused(where, what, got, f"fix it; for a private repository {TOKEN}") from None
    except errors.HFValidationError:
        raise HubRefused(where, what, f"{repo}, which is neither", "fix it") from None
    except errors.OfflineModeIsEnabled:
        got = f"{repo}, which is no path here and not in {cache()}, in offline mode"
        raise HubUnreachable(where, what, got, WAY_OUT) from None
    except errors.HfHubHTTPError as error:
        _raise_status(where, what, repo, error.response.status_code)
    except (HTTPError, OSError, RuntimeError) as error:
        _raise_failure(where, what, repo, error)


def endpoint() -> str:
    """Return the address of the hub, or of its mirror (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)).rstrip("/")


def is_offline() -> bool:
    """Return whether the cache alone may be used (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    is_set = os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES
    return is_set or bool(constants.HF_HUB_OFFLINE)


def _raise_failure(where: str, what: str, repo: str, error: Exception) -> None:
    # An OSError of the file system has a number. Errors of the library and of hf_xet, which transfers large files,
    # have none. hf_xet raises RuntimeError too where a connection fails.
    if isinstance(error, OSError) and error.errno is not None:
        got = f"{error.filename or cache()}: {error.strerror}"
        raise HubRefused(where, f"a cache that can be written for {repo}", got, "set HF_HOME") from None
    reason = type(error.__cause__ or error).__name__
    got = f"{repo}, which is no path here, and no answer of {endpoint()} ({reason})"
    raise HubUnreachable(where, what, got, WAY_OUT) from None


def _raise_status(where: str, what: str, repo: str, status: int) -> None:
    if status in (401, 403):
        got = f"status {status} of {endpoint()} for {repo}: the token is wrong, or lacks the right"
        raise HubRefused(where, what, got, TOKEN) from None
    got = f"status {status} of {endpoint()} for {repo}"
    raise (HubUnreachable if status >= 500 or status == 429 else HubRefused)(where, what, got, WAY_OUT) from None
