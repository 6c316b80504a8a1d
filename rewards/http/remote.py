"""A reward that another server computes: the request as JSON by POST, the answer a number or named numbers."""

import os
from collections.abc import Mapping
from typing import Any

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GROUP, GroupRequest, group_fields
from tidemill.rewards.http.calls import Calls
from tidemill.rewards.port import Parts, RewardRequest, fields_of


class Remote:
    """Asks ``tidemill reward-server``, or any server of ``{prompt, response, label, ...}``, such as slime's remote_rm.

    The answer is a number, a map of numbers, or a map with ``reward``, or ``failed`` with a reason. Options: ``url``;
    ``timeout_s`` of one attempt; ``retries``; ``connections``; ``token_env``: variable with a bearer token; ``key``:
    member of the answer with the reward.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 20.0,
        retries: int = 3,
        connections: int = 64,
        token_env: str = "",
        key: str = "",
    ) -> None:
        headers = bearer(token_env)
        self._calls, self._key = (
            Calls("remote", url, headers=headers, timeout_s=timeout_s, retries=retries, connections=connections),
            key,
        )

    async def __call__(self, request: RewardRequest) -> Parts:
        answer: Parts = await self._calls.post(fields_of(request), self._read)
        return answer

    def _read(self, answer: Any) -> Any:
        _refuse_failed(answer)
        key = self._key or ("reward" if isinstance(answer, Mapping) and not _is_reward(answer) else "")
        if key:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        if not _is_reward(answer):
            raise ValueError(f"want a number or a map of numbers{' under ' + key if key else ''}, got {answer!r}"[:300])
        return answer


class RemoteGroupReward:
    """A reward of groups: asks ``tidemill reward-server NAME --group``, or any server of ``{samples, rewards}``.

    The answer is a list with a reward for each sample, or a map with this under ``rewards``, or ``failed`` with a
    reason. Options as those of ``Remote``, but ``key``.
    """

    def __init__(
        self, url: str, timeout_s: float = 20.0, retries: int = 3, connections: int = 64, token_env: str = ""
    ) -> None:
        headers = bearer(token_env)
        self._calls = Calls(
            "remote", url, headers=headers, timeout_s=timeout_s, retries=retries, connections=connections
        )

    async def __call__(self, request: GroupRequest) -> list[Parts]:
        answer: list[Parts] = await self._calls.post(group_fields(request), self._read)
        return answer

    def _read(self, answer: object) -> list[Parts]:
        _refuse_failed(answer, GROUP.word)
        fields = answer.get("rewards") if isinstance(answer, Mapping) else answer
        if not isinstance(fields, list) or not all(map(_is_reward, fields)):
            raise ValueError(f"want a list of rewards, or a map with it under rewards, got {answer!r}"[:300])
        return fields


def _refuse_failed(answer: object, word: str = "reward") -> None:
    if isinstance(answer, Mapping) and isinstance(answer.get("failed"), str):
        raise RewardFailed("remote", f"failed there: {answer['failed'][:500]}", word)


def bearer(variable: str, where: str = "") -> dict[str, str]:
    """Return the header with the token in an environment variable; none for an empty name. Raises ValueError.

    ``where``: the option that names it, for the message; empty = an option of a reward.
    """
    if not variable:
        return {}
    token = os.environ.get(variable, "")
    if not token:
        problem = f"want the variable {variable} set"
        raise ValueError(f"{where}: {problem}" if where else f"{problem} where the actor runs")
    return {"Authorization": f"Bearer {token}"}


def _is_reward(answer: object) -> bool:
    if isinstance(answer, Mapping):
        return bool(answer) and all(_is_reward(value) and not isinstance(value, Mapping) for value in answer.values())
    return isinstance(answer, int | float) and not isinstance(answer, bool)
