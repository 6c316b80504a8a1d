"""Sums of rewards: weights, parts of parts, conditions, failures, and settings that are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.check_kit import write_prompts, write_run
from tests.refusals import refusal
from tidemill.actors.config import ActorConfig
from tidemill.actors.errors import NotAllowed
from tidemill.actors.guarded_settings import refuse_foreign
from tidemill.bus.section import read
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.part_settings import RewardParts
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.scorers import opened_parts

TWO = {
    "right": {"reward": "math_answer", "weight": 2, "options": {"format_weight": 0.0}},
    "short": {"reward": "overlong", "weight": 0.5, "options": {"max_tokens": 10, "buffer": 10}},
}


def request(response: str, label: Any = "7", *, length: int = 5, **metadata: Any) -> RewardRequest:
    return RewardRequest(
        prompt="p",
        response=response,
        label=label,
        status=Status.COMPLETED,
        metadata=metadata,
        response_length=length + 9,
        sampled_length=length,
    )


async def score(parts: dict[str, Any], of: RewardRequest) -> float | dict[str, float]:
    async with opened_parts(list(read(RewardParts, parts, "reward_parts").values()), ProcessLimits()) as scorer:
        return await scorer(of)


async def test_the_score_is_the_weighted_sum_and_every_part_is_kept() -> None:
    want = {"score": 1.75, "right": 1.0, "right.correct": 1.0, "right.format": 1.0, "short": -0.5}
    assert await score(TWO, request("#### 7")) == want
    assert await score({**TWO, "same": {"reward": "exact", "weight": 0}}, request("#### 7")) == {**want, "same": 0.0}
    assert await score({"same": "exact"}, request("7")) == {"score": 1.0, "same": 1.0}


async def test_a_part_applies_to_samples_with_its_metadata() -> None:
    parts = {
        name: {"reward": reward, "when": {"source": name}} for name, reward in (("sums", "gsm8k"), ("words", "f1"))
    }
    assert await score(parts, request("so 7", source="sums")) == {"score": 1.0, "sums": 1.0}
    assert await score(parts, request("so 7", source="words")) == {
        "score": pytest.approx(2 / 3),
        "words": pytest.approx(2 / 3),
    }
    with refusal(RewardFailed, reward="reward_parts", reason=re.compile(r"{'source': 'x'}.*sums: {'source': 'sums'}")):
        await score(parts, request("7", source="x"))


async def test_a_part_that_fails_fails_the_sample_by_name() -> None:
    with refusal(RewardFailed, reward="sums", place="sums", got="'x'"):
        await score({"sums": "gsm8k", "same": "exact"}, request("7", "x"))
    with pytest.raises(RewardFailed, match="within"):
        await score({"same": {"reward": "exact", "weight": 1e6}, "more": "exact"}, request("7"))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"score": "exact"}, r"reward_parts\.score: want another name"),
        ({"a": 3}, r"reward_parts\.a.*: want a (map|value)"),
        ({"a": {"weight": 1}}, r"reward_parts\.a.*: want a (map|value)"),
        ({"a": {"reward": "exact", "wait": 1}}, r"reward_parts\.a\.wait: no such setting"),
        ({"a": {"reward": "exact", "weight": "1"}}, r"reward_parts\.a\.weight: want a number"),
        ({"a": {"reward": "exact", "weight": float("nan")}}, r"reward_parts\.a\.weight: want a finite number"),
        ({"a": {"reward": "exact", "when": "x"}}, r"reward_parts\.a\.when: want a map"),
    ],
)
def test_parts_that_cannot_be_read_are_refused(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ActorConfig(reward_parts=parts)


def test_a_reward_and_parts_exclude_each_other() -> None:
    with refusal(ValueError, place="reward_parts"):
        ActorConfig(reward="exact", reward_parts=TWO)


@pytest.mark.parametrize("other", [{}, {"group_reward": "relative_length"}, {"reward": "exact"}])
def test_rows_without_a_reward_of_groups_need_another(other: dict[str, Any]) -> None:
    when = {"source": "chat"}
    with refusal(ValueError, place="group_reward_when"):
        ActorConfig(group_reward_when=when, **other)
    ActorConfig(group_reward="relative_length", group_reward_when=when, reward_parts=TWO)


def test_a_check_warns_of_a_reward_of_groups_that_no_row_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_run(tmp_path)
    write_prompts(
        tmp_path / "prompts.jsonl",
        *({"prompt": "p", "label": "1", "m": {"source": name}} for name in ("chat", "maths")),
    )
    for source, warned in (("chat", False), ("talk", True)):
        given = [
            "data.metadata_key=m",
            "actor.group_reward=relative_length",
            f"actor.group_reward_when={json.dumps({'source': source})}",
        ]
        report = check(load(config, given), Purpose())
        assert not report.errors
        assert ["group_reward_when" in one.text and "none of 2" in one.text for one in report.warnings] == [
            True
        ] * warned
    for name in ("SURE_ROWS", "READ_S"):
        monkeypatch.setattr(f"tidemill.launch.checks.data.{name}", 0)
    assert not check(load(config, given), Purpose()).warnings, "rows that were not read may have it"
    warnings = check(load(config, [*given[1:], "prepare.kind=digits", "data.path="]), Purpose()).warnings
    assert ["none of 1" in one.text for one in warnings if "group_reward_when" in one.text] == [True]


def test_the_bus_names_no_code_in_a_part() -> None:
    refuse_foreign({"actor": {"reward_parts": {**TWO, "same": "exact"}}}, "actor", (), where="run r")
    for part in ("os:system", {"reward": "os:system"}, {"weight": 1}, ["os:system"]):
        with refusal(NotAllowed, named=re.compile(r"^actor\.reward_parts\.x=")):
            refuse_foreign({"actor": {"reward_parts": {"x": part}}}, "actor", (), where="run r")
    refuse_foreign({"actor": {"reward_parts": {"x": "my:f"}}}, "actor", ("actor.reward_parts.x=my:*",), where="run r")


def test_the_parts_belong_to_a_runs_digest() -> None:
    def digest(**actor: Any) -> str:
        return RunConfig(actor=ActorConfig(**actor)).digest()

    other = {**TWO, "short": {**TWO["short"], "weight": 1.0}}
    assert len({digest(), digest(reward="exact"), digest(reward_parts=TWO), digest(reward_parts=other)}) == 4
    assert digest(reward_parts=TWO) == digest(reward_parts=dict(TWO))
    ranked = {"reward": "exact", "group_reward": "relative_length"}
    assert digest(**ranked) == digest(**ranked, group_reward_when={}) != digest(**ranked, group_reward_when={"a": 1})


def test_a_check_names_the_part_with_a_wrong_option(tmp_path: Path) -> None:
    parts = json.dumps({"right": "exact", "short": {"reward": "overlong", "options": {"max_tokens": 3}}})
    report = check(load(write_run(tmp_path), ["actor.reward=''", f"actor.reward_parts={parts}"]), Purpose())
    assert ["actor.reward_parts.short.options.buffer" in error.text for error in report.errors] == [True]
