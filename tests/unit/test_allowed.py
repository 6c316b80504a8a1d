"""The machine settings that the run's row may change, and those that it may not."""

import re
import typing
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.actors.config import ActorConfig, EngineConfig, GatewayConfig, ScorersConfig, SglangConfig
from tidemill.actors.errors import NotAllowed
from tidemill.actors.guarded_settings import GUARDED, checked, refuse_foreign
from tidemill.launch.run.access import allowed
from tidemill.launch.settings.config_loader import changes, from_map, load, to_map
from tidemill.launch.settings.run_config import RunConfig

OPEN = {
    "actor.engines": "addresses it asks",
    "actor.rollouts": "names of rollouts, the programs of which are checked",
    "actor.teachers": "addresses it asks; the directory is used by `tidemill up` alone",
    "actor.reward_options": "values for a reward that is allowed",
    "actor.group_reward_options": "values for a reward that is allowed",
    "actor.max_samples_in_flight": "auto, or a number",
    "actor.group_reward_when": "values that are compared with metadata",
    "actor.gateway": "its parts, each by itself",
    "actor.gateway.host": "an address it listens at, where every request needs the key of an episode",
    "actor.gateway.advertise": "the address that its programs are given",
    "actor.gateway.renderer": "a name of a table of the library",
    "actor.scorers": "its parts, each by itself",
    "actor.scorers.host": "an address that scorers of the run's own machine listen at",
    "actor.scorers.advertise": "the address that their actors are given",
    "actor.gateway.untrained_models": "names in the requests of its programs",
    "actor.gateway.renderer_options": "switches and texts of its prompts, checked by the library",
    "engine.kind": "a name of a table",
    "engine.family": "follows from learner.family, which is guarded",
    "engine.host": "an address it listens at",
    "engine.advertise": "the address others find it at; never taken from the bus",
    "engine.device": "one of three",
    "engine.devices": "GPUs of this machine, by number or UUID",
    "engine.dtype": "one of three",
    "engine.runner": "one of three",
    "engine.sglang": "its parts, each by itself",
    "engine.sglang.url": "an address it asks",
    "engine.sglang.pause": "one of two",
}
"""Settings that are not numbers, and name neither code nor programs nor files."""


def test_every_setting_that_is_no_number_is_guarded_or_open_for_a_reason() -> None:
    kinds = {
        "actor": ActorConfig,
        "actor.gateway": GatewayConfig,
        "actor.scorers": ScorersConfig,
        "engine": EngineConfig,
        "engine.sglang": SglangConfig,
    }
    hints = {path: typing.get_type_hints(kind) for path, kind in kinds.items()}
    found = {
        f"{path}.{name}"
        for path, types in hints.items()
        for name, kind in types.items()
        if kind not in (int, float, bool)
    }
    assert found | {"rollouts", "learner.family"} == GUARDED.keys() | OPEN.keys()


def row(**sglang: Any) -> dict[str, Any]:
    return {"actor": {"reward": "digits"}, "engine": {"kind": "sglang", "sglang": sglang}}


HARMLESS: list[dict[str, Any]] = [
    {},
    {"actor": {"reward": "math_answer", "reward_options": {"x": "y"}}},
    {
        "engine": {
            "sglang": {
                "python": "python3",
                "arguments": {"tp_size": 2, "mem_fraction_static": 0.8},
                "environment": {},
                "log": "",
            }
        }
    },
    to_map(RunConfig()),
]


@pytest.mark.parametrize("setting", ["actor.reward", "actor.reward_parts.a", "actor.group_reward"])
@pytest.mark.parametrize("name", ["judge", "remote", "reward_model", "code", "mine:f"])
def test_rewards_that_ask_servers_or_run_programs_are_taken_only_where_they_are_allowed(
    setting: str, name: str
) -> None:
    """Their options name servers, variables of the environment and interpreters: the writer of the row must not choose
    those.
    """
    values: dict[str, Any] = {
        "actor": {"reward_parts": {"a": name}} if "parts" in setting else {setting.partition(".")[2]: name}
    }
    with refusal(NotAllowed, named=re.compile(rf"^{setting}={name}\b")):
        refuse_foreign(values, "actor", (), where="the row")
    refuse_foreign(values, "actor", checked([f"{setting}={name}"]), where="the row")
    refuse_foreign(values, "engine", (), where="the row")


def test_programs_of_rollouts_are_taken_only_where_they_are_allowed() -> None:
    values = {"rollouts": {"a": {"use": "agent:mine:Agent", "python": "/opt/x"}, "b": {"use": "agent:yours:f"}}}
    refuse_foreign(values, "engine", (), where="the row")
    with pytest.raises(NotAllowed) as error:
        refuse_foreign(values, "actor", checked(["rollouts.a.use=agent:mine:*"]), where="the row")
    for setting in ("rollouts.a.python=/opt/x names a program", "rollouts.b.use=agent:yours:f names code"):
        assert setting in str(error.value)
    assert "agent:mine" not in str(error.value)
    refuse_foreign(values, "actor", checked(["rollouts.*=*"]), where="the row")


def test_options_of_rollouts_that_name_code_are_taken_only_where_they_are_allowed() -> None:
    """Tools and environments of the programs that ship are named by import path in their options."""
    values = {
        "rollouts": {
            "a": {"use": "tools", "options": {"tools": ["os:system"], "max_turns": 4, "environment": "mine:Walk"}}
        }
    }
    refuse_foreign(values, "engine", (), where="the row")
    with pytest.raises(NotAllowed) as error:
        refuse_foreign(
            values, "actor", checked(["rollouts.a.use=tools", "rollouts.a.options.environment=mine:*"]), where="the row"
        )
    assert 'rollouts.a.options.tools=["os:system"] names code' in str(error.value)
    assert "max_turns" not in str(error.value)
    assert "mine:Walk" not in str(error.value)
    refuse_foreign(values, "actor", checked(["rollouts.a.use=tools", "rollouts.a.options.*=*"]), where="the row")


@pytest.mark.parametrize("values", HARMLESS)
def test_defaults_numbers_and_rewards_of_the_house_are_taken(values: dict[str, Any]) -> None:
    for role in ("actor", "engine"):
        refuse_foreign(values, role, (), where="the row")


@pytest.mark.parametrize(
    ("sglang", "setting", "pattern"),
    [
        ({"python": "/tmp/x"}, "engine.sglang.python=/tmp/x", "engine.sglang.python=/tmp/*"),
        (
            {"arguments": {"tp_size": 2, "plugin": "a.b"}},
            "engine.sglang.arguments.plugin=a.b",
            "engine.sglang.arguments.plugin=a.*",
        ),
        (
            {"arguments": {"trust_remote_code": True}},
            "engine.sglang.arguments.trust_remote_code=true",
            "engine.sglang.arguments.*=*",
        ),
        ({"arguments": ["--x"]}, 'engine.sglang.arguments=["--x"]', "engine.sglang.*=*"),
        (
            {"environment": {"LD_PRELOAD": "x.so"}},
            "engine.sglang.environment.LD_PRELOAD=x.so",
            "engine.sglang.environment.LD_PRELOAD=x.so",
        ),
        ({"log": "/etc/cron.d/x"}, "engine.sglang.log=/etc/cron.d/x", "*=*"),
    ],
)
def test_what_names_a_program_or_a_file_is_refused_with_the_way_to_allow_it(
    sglang: dict[str, Any], setting: str, pattern: str
) -> None:
    with pytest.raises(NotAllowed) as error:
        refuse_foreign(row(**sglang), "engine", ("actor.reward=*", "engine.sglang.python=/opt/*"), where="run r")
    assert setting in str(error.value)
    assert "--allow" in str(error.value)
    assert error.value.exit_code == 78
    for good in (pattern, setting):
        refuse_foreign(row(**sglang), "engine", checked([good]), where="run r")
    refuse_foreign(row(**sglang), "actor", (), where="run r")


def test_a_family_of_ones_own_is_code_of_engines() -> None:
    values = {"learner": {"family": "os:environ"}}
    with refusal(NotAllowed, named=re.compile(r"^learner\.family=os:environ names code")):
        refuse_foreign(values, "engine", (), where="the row")
    refuse_foreign(values, "engine", checked(["learner.family=os:*"]), where="the row")
    refuse_foreign(values, "actor", (), where="the row")


def test_an_import_path_is_code() -> None:
    values = {"actor": {"reward": "os:system"}, "engine": {"sglang": {"python": "/tmp/x"}}}
    with refusal(
        NotAllowed,
        where="run r",
        named=re.compile(r"^actor\.reward=os:system\b"),
        cure=re.compile(r"--allow actor\.reward=os:system$"),
    ):
        refuse_foreign(values, "actor", ("actor.reward=myreward:*",), where="run r")
    refuse_foreign(values, "actor", ("actor.reward=os:*",), where="run r")


@pytest.mark.parametrize("scorers", [{"enabled": 1}, {"enabled": "yes"}, {"enabled": False}, {}, [], None])
def test_without_scorers_an_actor_wants_permission_for_the_reward(scorers: object) -> None:
    """So it does where the row has a value that is neither true nor false."""
    values = {"actor": {"reward": "mine:f", "scorers": scorers}}
    with refusal(NotAllowed, named=re.compile(r"^actor\.reward=mine:f\b")):
        refuse_foreign(values, "actor", (), where="the row")


@pytest.mark.parametrize("scorers", [{"enabled": True}, {"enabled": 1}, {"enabled": False}, {}, None])
def test_a_scorer_always_wants_permission_for_the_reward(scorers: object) -> None:
    values = {"actor": {"reward": "mine:f", "scorers": scorers}}
    with refusal(NotAllowed, named=re.compile(r"^actor\.reward=mine:f\b")):
        refuse_foreign(values, "scorer", (), where="the row")
    refuse_foreign(values, "scorer", ("actor.reward=mine:*",), where="the row")


@pytest.mark.parametrize("path", ["actor.scorers.enabled", "actor.scorers", "actor"])
def test_scorers_that_are_switched_off_here_are_none(path: str) -> None:
    """The setting given on this machine counts, and with it actors load the row's reward again."""
    values = {"actor": {"reward": "mine:f", "scorers": {"enabled": True}}}
    refuse_foreign(values, "actor", (), where="the row", changed=["actor.retries"])
    with pytest.raises(NotAllowed):
        refuse_foreign(values, "actor", (), where="the row", changed=[path])


@pytest.mark.parametrize("pattern", ["actor.reward", "actor.retries=3", "engine.sglang.pythonx=*", ""])
def test_a_pattern_that_fits_nothing_is_refused(pattern: str) -> None:
    with refusal(ValueError, place="--allow"):
        checked([pattern])


def test_the_environment_allows_as_well_and_is_no_setting() -> None:
    environment = {"TIDEMILL_ALLOW": "actor.reward=mine:* 'engine.sglang.log=/var/log/a b'"}
    assert allowed(["engine.sglang.python=x"], environment) == (
        "engine.sglang.python=x",
        "actor.reward=mine:*",
        "engine.sglang.log=/var/log/a b",
    )
    load([], [], environment)


def test_what_this_machine_sets_itself_is_not_refused_and_counts() -> None:
    """A machine may set all of a map or one entry: the other entries of the row are still refused."""
    row = {"engine": {"sglang": {"python": "/row", "environment": {"A": "row"}}}}
    mine = changes(["engine.sglang.python=/mine", "engine.sglang.environment={B: mine}"], {})
    refuse_foreign(row, "engine", allowed([], {}, replaced=mine), where="row")
    sglang = from_map(
        {**row, "actor": {"reward": "exact"}, "model": {"path": "m"}, "data": {"path": "d"}, "run": "r"}, "row", mine
    ).engine.sglang
    assert (sglang.python, sglang.environment) == ("/mine", {"B": "mine"})
    with refusal(NotAllowed, named=re.compile(r"environment\.A=row\b")):
        refuse_foreign(
            row,
            "engine",
            allowed([], {}, replaced=["engine.sglang.python", "engine.sglang.environment.B"]),
            where="row",
        )
