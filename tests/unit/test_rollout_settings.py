"""Settings of rollouts: refusals by name, derived values, and the part in a run's digest."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.actors.rollout_settings import BUILT_IN, RolloutConfig, RolloutPrograms, served
from tidemill.bus.section import Sections, read
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.cli.main import command_parser
from tidemill.launch.settings.config_loader import SettingsError, changes, from_map, load, to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.feed.feeder_settings import within

USE = "agent:mine:Agent"


def test_defaults() -> None:
    found = read(Sections[RolloutConfig], {"a": {"use": USE, "budget": {"context": 9}}}, "rollouts")["a"]
    assert (found.program, found.python, found.processes, found.memory_mb) == ("mine:Agent", "", 4, 4096)
    assert found.limits == Budget(turns=64, context=9, seconds=1800.0)
    assert read(Sections[RolloutConfig], {"a": {"use": "agent:pack.mod:Outer.f"}}, "rollouts")["a"] == RolloutConfig(
        use="agent:pack.mod:Outer.f"
    )


def test_limits_of_processes_are_off_by_default() -> None:
    config = read(Sections[RolloutConfig], {"a": {"use": USE}}, "rollouts")["a"]
    assert (config.cpu_s, config.open_files, config.file_mb) == (0, 0, 0)


def test_a_taskset_of_verifiers() -> None:
    found = read(
        Sections[RolloutConfig],
        {"a": {"use": "verifiers:org/sums@1.2", "python": "/opt/python", "options": {"agent": {"max_turns": 2}}}},
        "rollouts",
    )["a"]
    assert (found.taskset, found.module, found.python) == ("org/sums@1.2", "verifiers", "/opt/python")
    file, _, name = found.program.rpartition(":")
    assert Path(file).is_file() and name == "Taskset"
    assert found.arguments("/m") == {"id": "org/sums@1.2", "model": "/m", "agent": {"max_turns": 2}}
    assert read(Sections[RolloutConfig], {"a": {"use": USE}}, "rollouts")["a"].taskset == ""


def test_openenv_is_multi_turn_with_a_server() -> None:
    options = {"max_turns": 3, "environment_options": {"action": "text"}}
    found = read(Sections[RolloutConfig], {"a": {"use": "openenv:ws://envs:8000/x", "options": options}}, "rollouts")[
        "a"
    ]
    assert found.program == BUILT_IN["multi_turn"]
    given = {"url": "ws://envs:8000/x", "action": "text"}
    assert found.arguments("") == {"max_turns": 3, "environment": "openenv", "environment_options": given}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"a b": {"use": USE}}, "want a name"),
        ({"a": 5}, "rollouts.a: want a map"),
        (
            {"a": {}},
            "rollouts.a.use: want a value, got nothing",
        ),
        (
            {"a": {"use": "many_turns"}},
            "want multi_turn, dataset, agent:MODULE:NAME, slime:MODULE:NAME, verifiers:TASKSET or openenv:URL",
        ),
        (
            {"a": {"use": "agent:mine"}},
            "want multi_turn, dataset, agent:MODULE:NAME, slime:MODULE:NAME, verifiers:TASKSET or openenv:URL",
        ),
        (
            {"a": {"use": "agent:mine:f()"}},
            "want multi_turn, dataset, agent:MODULE:NAME, slime:MODULE:NAME, verifiers:TASKSET or openenv:URL",
        ),
        ({"a": {"use": "verifiers:"}}, "slime:MODULE:NAME, verifiers:TASKSET or openenv:URL, got 'verifiers:'"),
        (
            {"a": {"use": "verifiers:sums", "options": {"tasks": {}}}},
            "rollouts.a.options.tasks: no such option with verifiers:TASKSET",
        ),
        (
            {"a": {"use": "verifiers:sums", "again": "resume"}},
            "rollouts.a.again: want restart or replay with verifiers:TASKSET",
        ),
        (
            {"a": {"use": "openenv:envs:8000"}},
            "rollouts.a.use: want multi_turn, dataset, agent:MODULE:NAME, .* or openenv:URL",
        ),
        (
            {"a": {"use": "openenv:http://e", "options": {"environment_options": 3}}},
            "rollouts.a.options.environment_options: want a map",
        ),
        ({"a": {"use": USE, "colour": 1}}, "rollouts.a.colour: no such setting"),
        ({"a": {"use": USE, "options": [1]}}, "rollouts.a.options: want a map"),
        ({"a": {"use": USE, "python": 3}}, "rollouts.a.python"),
        ({"a": {"use": USE, "processes": 0}}, "rollouts.a.processes: want > 0, got 0"),
        ({"a": {"use": USE, "episodes_per_child": True}}, "rollouts.a.episodes_per_child"),
        ({"a": {"use": USE, "memory_mb": -1}}, "rollouts.a.memory_mb: want >= 0, got -1"),
        ({"a": {"use": USE, "cpu_s": 0.5}}, "rollouts.a.cpu_s: want a whole number, such as 3, got 0.5"),
        ({"a": {"use": USE, "open_files": -1}}, "rollouts.a.open_files: want >= 0, got -1"),
        ({"a": {"use": USE, "drain_s": -1}}, "rollouts.a.drain_s: want >= 0, got -1"),
        ({"a": {"use": USE, "again": "retry"}}, "rollouts.a.again: want restart, replay or resume .*, got 'retry'"),
        (
            {"a": {"use": USE, "again": "replay", "unlogged": "end"}},
            "rollouts.a.unlogged: want continue or fail, got 'end'",
        ),
        (
            {"a": {"use": USE, "unlogged": "fail"}},
            "rollouts.a.unlogged: want again: replay or resume with fail, got again: restart",
        ),
        ({"a": {"use": USE, "budget": 5}}, "rollouts.a.budget: want a map"),
        ({"a": {"use": USE, "budget": {"turn": 5}}}, "rollouts.a.budget.turn: no such setting"),
        ({"a": {"use": USE, "budget": {"turns": -1}}}, "rollouts.a.budget.turns: want >= 0"),
        ({"a": {"use": USE, "budget": {"seconds": float("inf")}}}, "rollouts.a.budget.seconds"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(").replace(")", r"\)")):
        read(Sections[RolloutConfig], given, "rollouts")


def test_episodes_that_go_on_behind_a_state_need_their_log() -> None:
    ways = [("restart", None), ("replay", None), ("resume", None), ("replay", "fail"), ("resume", "continue")]
    found = [
        read(Sections[RolloutConfig], {"a": {"use": USE, "again": again, "unlogged": unlogged}}, "rollouts")[
            "a"
        ].needs_log
        for again, unlogged in ways
    ]
    assert found == [False, False, True, True, False]


def test_an_actor_serves_the_rollouts_that_it_names() -> None:
    known = read(
        Sections[RolloutConfig], {"b": {"use": USE}, "a": {"use": USE}, "written": {"use": "dataset"}}, "rollouts"
    )
    assert served(known, ()) == ("single_turn", "b", "a")
    assert served(known, ("a",)) == ("a",) and served(known, ("a", "single_turn", "a")) == ("single_turn", "a")
    with refusal(ValueError, place="actor.rollouts", got=re.compile("^'written',")):
        served(known, ("written",))
    assert [*RolloutPrograms(rollouts=known, model="").only(("a", "single_turn")).programs] == ["a"]


def config(tmp_path: Path, text: str, *settings: str) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load(file, settings).config


TWO = "rollouts: {b: {use: 'agent:mine:B'}, a: {use: 'agent:mine:A', budget: {turns: 3}}}\n"


def test_queues_follow_from_rollouts(tmp_path: Path) -> None:
    found = config(tmp_path, TWO + "data: {rollout: a}\n")
    assert found.bus.rollouts == ("a", "b") and found.trained_rollouts["a"].budget.turns == 3
    assert from_map(to_map(found), "again") == found
    assert config(tmp_path, "seed: 1\n").bus.rollouts == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (TWO + "data: {rollout: c}", "data.rollout: want a name in rollouts"),
        ("data: {rollout: a}", "which has none"),
        (
            "rollouts: {a: {use: 'agent:mine:A', drain_s: 60}}",
            "rollouts.a.drain_s: want less than up.drain_s = 60, after which an actor is ended; raise that one, got 60",
        ),
        (
            "rollouts: {solver: {use: 'agent:mine:A'}}\nactor: {rollouts: [solvr]}",
            (
                "actor.rollouts: want names in rollouts, or single_turn (single_turn, solver), got 'solvr', did "
                "you mean 'solver'?"
            ),
        ),
        (
            TWO + "actor: {rollouts: [a, other]}",
            "actor.rollouts: want names in rollouts, or single_turn (single_turn, b, a), got 'other'",
        ),
        ("actor: {rollouts: [a]}", "actor.rollouts: want names in rollouts, or single_turn (single_turn), got 'a'"),
        (TWO + "bus: {rollouts: [a]}", "bus.rollouts: follows from rollouts"),
        ("rollouts: {a: {use: x}}", "rollouts.a.use"),
        ("rollouts: {single_turn: {use: 'agent:mine:A'}}", "rollouts.single_turn: want another name"),
        (
            TWO + "data: {sources: {x: {path: x.jsonl, rollout: c}}}",
            "data.rollout: want a name in rollouts (a, b) or single_turn, got 'c'",
        ),
        (
            TWO + "eval: {every: 1, sets: {held: {path: x.jsonl, rollout: c}}}",
            "eval.sets.held.rollout: want a name in rollouts (a, b)",
        ),
    ],
)
def test_contradictions(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        config(tmp_path, text)


def test_the_command_of_an_actor_names_rollouts() -> None:
    assert command_parser().parse_args(["actor", "--bus", "nats://127.0.0.1:1"]).set == []
    args = command_parser().parse_args(
        ["actor", "--bus", "nats://127.0.0.1:1", "--rollouts", "a,single_turn", "--set", "actor.retries=5"]
    )
    found = changes(args.set, {})
    assert {path: setting.value for path, setting in found.items()} == {
        "actor.rollouts": ["a", "single_turn"],
        "actor.retries": 5,
    }


def test_the_digest_has_what_decides_the_samples(tmp_path: Path) -> None:
    plain, unused = config(tmp_path, "seed: 1\n"), config(tmp_path, TWO + "seed: 1\n")
    used = config(tmp_path, TWO + "seed: 1\ndata: {rollout: a}\n")
    assert plain.digest() == unused.digest() != used.digest()
    places = (
        "rollouts.a.python=/opt/python",
        "rollouts.a.processes=2",
        "rollouts.a.memory_mb=0",
        "rollouts.a.drain_s=9",
        "rollouts.a.again=replay",
        "rollouts.a.unlogged=fail",
    )
    places += ("rollouts.b.use=agent:yours:B",)
    assert config(tmp_path, TWO + "seed: 1\ndata: {rollout: a}\n", *places).digest() == used.digest()
    for change in ("rollouts.a.use=agent:yours:A", "rollouts.a.budget.turns=4"):
        assert config(tmp_path, TWO + "seed: 1\ndata: {rollout: a}\n", change).digest() != used.digest()


def test_rows_may_have_rollouts_of_their_own(tmp_path: Path) -> None:
    one = config(tmp_path, TWO + "data: {rollout: a}\n")
    column = config(tmp_path, TWO + "data: {rollout: a, rollout_key: r}\n")
    sources = config(
        tmp_path, TWO + "data: {sources: {x: {path: x.jsonl, rollout: b}, y: {path: y.jsonl, rollout: single_turn}}}\n"
    )
    none = config(tmp_path, TWO + "data: {rollout: single_turn}\n")
    assert [[*each.trained_rollouts] for each in (one, column, sources, none)] == [["a"], ["a", "b"], ["b"], []]
    assert len({each.digest() for each in (one, column, sources, none)}) == 4


def test_sequences_are_no_longer_than_the_learner_takes() -> None:
    assert within(Budget(turns=3), 100) == Budget(turns=3, context=100)
    assert within(Budget(context=50), 100).context == 50
    assert within(Budget(context=500), 100).context == 100
    assert within(Budget(context=500), 0).context == 500
