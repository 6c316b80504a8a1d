"""Scores of prompts by a running engine, SGLang or built-in, over HTTP, and the dtype in which it computes."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.bus.system.processes import direct_opener
from tidemill.rewards.remote import bearer

if TYPE_CHECKING:
    from tidemill.learner.debug.train_file import Array

ANSWER_S = 120.0
MAX_ANSWER_BYTES = 256 << 20
"""Seconds for an engine to score a prompt."""
DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
"""Dtypes by their names in an engine's answer. SGLang's ``auto`` depends on the model and the device."""


class RunningEngine:
    """The address of an engine, and the key for it."""

    def __init__(self, url: str, key_env: str) -> None:
        """``key_env``: variable with the key; empty = none. Raises ValueError for a variable that is not set."""
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **bearer(key_env, "--key-env")}
        self._opener = direct_opener(_NotFollowed())

    def log_probs(self, prompts: Sequence[Sequence[int]]) -> "dict[str, Array]":
        """Return the log-probs of the prompts' own tokens but the first: ``<prompt>.log_probs`` -> [T - 1, 1], float32.

        Raises ValueError for an engine that does not return them.
        """
        outputs: dict[str, Array] = {}
        for number, tokens in enumerate(prompts):
            body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
            try:
                answer = self._json("/generate", body | {"return_logprob": True, "logprob_start_len": 0})
                values = [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]
            except urllib.error.HTTPError as error:
                text = error.read()[:200].decode(errors="replace")
                raise ValueError(
                    f"--engine: want an engine that scores prompts, got HTTP {error.code}: {text}"
                ) from None
            except (HTTPException, OSError, ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"--engine: want an engine that scores prompts at {self._url}, got {error!r}"
                ) from None
            if len(values) != len(tokens) - 1:
                want = "score its weights with --model DIR"
                raise ValueError(
                    f"--engine: want {len(tokens) - 1} log-probs of prompt {number}, got {len(values)}; {want}"
                )
            outputs[f"{number}.log_probs"] = np.array(values, np.float32)[:, None]
        return outputs

    def dtype(self) -> str:
        """Return the dtype in the engine's answer to GET /server_info; empty if there is none."""
        try:
            answer = self._json("/server_info")
        except (HTTPException, OSError, ValueError):
            return ""
        return DTYPES.get(str(answer.get("dtype")).removeprefix("torch."), "") if isinstance(answer, Mapping) else ""

    def _json(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with self._opener.open(
            urllib.request.Request(self._url + path, data, self._headers), timeout=ANSWER_S
        ) as response:
            return json.loads(response.read(MAX_ANSWER_BYTES))  # a longer one is cut off, and no JSON


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would take the key to another server."""

    def redirect_request(self, *_: object) -> None:
        """Return no request; the answer is an error then."""
