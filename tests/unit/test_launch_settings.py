"""The configuration of a run: precedence, strictness, errors that name path and nearest key, contradictions refused
with the reason.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from tests.refusals import refusal
from tidemill.actors.serving.sglang.server_process import server_arguments
from tidemill.launch.settings.config_loader import SettingsError, from_map, load, render, to_map
from tidemill.launch.settings.run_config import RunConfig

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "launch/configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "digits.yaml"
    file.write_text(text)
    return file


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "learner: {steps: 1, groups_per_step: 2}\nstaleness: {max_lag: 3}\n")
    environment = {"TIDEMILL_LEARNER__STEPS": "9", "HOME": "/nowhere", "TIDEMILL": "no setting"}
    loaded = load(file, ["learner.steps=5", "staleness.max_lag=4"], environment)
    assert loaded.config.learner.steps == 9, "environment over --set over file"
    assert loaded.config.staleness.max_lag == 4, "--set over file"
    assert loaded.config.learner.groups_per_step == 2, "file over default"
    assert loaded.config.learner.group_size == RunConfig().learner.group_size


def test_of_several_files_the_later_one_wins(tmp_path: Path) -> None:
    first = write(tmp_path, "learner: {steps: 1, groups_per_step: 2}\n")
    second = tmp_path / "more.yaml"
    second.write_text("learner: {steps: 3}\nengine: {sglang: {arguments: {tp_size: 2}}}\n")
    loaded = load([first, second], ["engine.sglang.arguments.random_seed=1"])
    assert (loaded.config.learner.steps, loaded.config.learner.groups_per_step) == (3, 2)
    assert loaded.config.engine.sglang.arguments == {"tp_size": 2, "random_seed": 1}
    assert loaded.config.run == "digits-more"
    assert f"steps: 3{' ' * 38} # {second}:1" in render(loaded)


def test_every_value_has_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 7\nlearner:\n  steps: 1\n")
    text = render(load(file, ["up.actors=3"], {"TIDEMILL_BUS__LEASE_S": "4"}))
    line = {match[1]: match[2] for match in re.finditer(r"^ *(\w+): .* # (.*)$", text, re.MULTILINE)}
    assert line["steps"] == f"{file}:3"
    assert line["actors"] == "--set"
    assert line["lease_s"] == "environment TIDEMILL_BUS__LEASE_S"
    assert line["run"] == "derived: name of the file"
    assert line["restarts"] == "default"
    assert "samples per step = groups_per_step x group_size" in text


def test_what_is_printed_can_be_loaded_again(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        (
            "prepare: {kind: digits}\nsampling: {stop: [a, b]}\nactor: {reward_options: {x: 1}}\nlearner: "
            "{optimizer: {lr: 1e-3}}\n"
        ),
    )
    config = load(file).config
    assert config.learner.optimizer.lr == 1e-3, "YAML reads 1e-3 as a word"
    again = write(tmp_path, render(load(file)))
    assert load(again).config == config
    assert from_map(yaml.safe_load(yaml.safe_dump(to_map(config))), "test") == config


def test_seed_and_directories_are_derived_unless_set(tmp_path: Path) -> None:
    config = load(write(tmp_path, "seed: 5\nprepare: {task: sort}\n"), ["learner.seed=8"]).config
    assert (config.data.seed, config.prepare and config.prepare.seed, config.learner.seed) == (5, 5, 8)
    assert config.run == "digits"
    assert config.model.path == "runs/digits/prepared/model"
    assert config.data.path == "runs/digits/prepared/prompts.jsonl"


def test_one_setting_makes_learner_and_engines_share(tmp_path: Path) -> None:
    config = load(write(tmp_path, ""), ["learner.colocated=true"]).config
    assert config.engine.colocated and not config.weights.overlap
    alone = load(write(tmp_path, "")).config
    assert not alone.engine.colocated and alone.weights.overlap


def test_one_setting_makes_engines_return_experts(tmp_path: Path) -> None:
    config = load(write(tmp_path, ""), ["learner.routing_replay=rollout"]).config
    assert config.actor.routed_experts and config.engine.routed_experts
    assert server_arguments(config.engine)["enable_return_routed_experts"] is True
    other = load(write(tmp_path, ""), ["learner.routing_replay=old"]).config
    assert not other.actor.routed_experts and not other.engine.routed_experts
    assert "enable_return_routed_experts" not in server_arguments(other.engine)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learner: {stepz: 3}", "learner.stepz: no such setting; did you mean learner.steps?"),
        ("lerner: {steps: 3}", "lerner: no such setting; did you mean learner?"),
        (
            "weights: {deltas: 0}",
            "weights.deltas: this setting was removed: engines that are behind load whole weights",
        ),
        (
            "learner: {algorithm: {clip_low: 0.1}}",
            "learner.algorithm.clip_low: this setting has another name now; want learner.algorithm.clip.low",
        ),
        (
            "learner: {algorithm: {weight: token}}",
            "algorithm.weight: want a map of settings, such as {level: ...}, got",
        ),
        ("learner: {steps: many}", "learner.steps: want a whole number, such as 3, got 'many'"),
        ("learner: {steps: 1.5}", "learner.steps: want a whole number, such as 3, got 1.5"),
        ("learner: {steps: true}", "learner.steps: want a whole number, such as 3, got true"),
        ("learner: {prefetch: 1}", "learner.prefetch: want true or false, got 1"),
        ("learner: 3", "learner: want a map of settings, such as {steps: ...}, got 3"),
        ("learner: {steps: 0}", "learner.steps: want > 0, got 0"),
        ("learner: {optimizer: {lr: -1}}", "learner.optimizer.lr: want > 0, got -1"),
        ("sampling: {stop: [1, {}]}", r"sampling.stop\[1\]: want text, in quotes .*, got {}"),
        ("learner: {steps: 1}\nlearner: {group_size: 2}", "learner: given twice, first in line 2"),
        ("learner: {optimizer: {lr: .inf}}", "learner.optimizer.lr: want a finite number, got inf"),
        ("a: [", "not YAML"),
    ],
)
def test_errors_name_file_line_path_and_cure(tmp_path: Path, text: str, complaint: str) -> None:
    file = write(tmp_path, f"# a comment\n{text}\n")
    with pytest.raises(SettingsError, match=complaint) as error:
        load(file)
    assert str(file) in str(error.value)
    if "YAML" not in complaint:
        assert f"{file}:{3 if 'twice' in complaint else 2}" in str(error.value)


def test_a_map_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    file = write(tmp_path, "learner: {steps: 1, groups_per_step: 2}\nactor: {reward_options: {a: 1, b: 2}}\n")
    settings = ["learner={steps: 9, optimizer: {lr: 0.5}}", "actor.reward_options.b=3", "actor.reward_options.c.d=4"]
    loaded = load(file, settings)
    assert (loaded.config.learner.steps, loaded.config.learner.groups_per_step, loaded.config.learner.optimizer.lr) == (
        9,
        2,
        0.5,
    )
    assert loaded.config.actor.reward_options == {"a": 1, "b": 3, "c": {"d": 4}}
    assert re.search(
        rf"reward_options: {{a: 1, b: 3, c: {{d: 4}}}} +# {re.escape(str(file))}:2, --set\n", render(loaded)
    )
    assert load(file, [*settings, "actor.reward_options={e: 5}"]).config.actor.reward_options == {"e": 5}, (
        "the last word counts"
    )


def test_nothing_is_prepared_unless_asked_for(tmp_path: Path) -> None:
    asked = write(tmp_path, "prepare: {}\n")
    assert load(asked).config.prepare is not None
    assert load(asked).config.model.path
    without = load(asked, ["prepare=null"]).config
    assert (without.prepare, without.model.path, without.data.path) == (None, "", "")
    assert load(asked, ["prepare=null", "prepare.task=sort"]).config.prepare is not None


def test_the_environment_reaches_every_setting_and_is_as_strict(tmp_path: Path) -> None:
    file = write(tmp_path, "")
    assert load(file, environment={"TIDEMILL_SEED": "4"}).config.learner.seed == 4
    with refusal(SettingsError, place="environment TIDEMILL_SEDE"):
        load(file, environment={"TIDEMILL_SEDE": "4"})


def test_a_name_made_of_the_file_is_fit_for_the_bus(tmp_path: Path) -> None:
    file = tmp_path / "my run v1.2.yaml"
    file.write_text("")
    assert load(file).config.run == "my-run-v1-2"


def test_the_digest_depends_on_training_settings_and_not_on_directories(tmp_path: Path) -> None:
    file = write(tmp_path, "prepare: {}")
    digest = load(file).config.digest()
    for same in ("directory=elsewhere", "bus.port=4333", "up.actors=3", "run=other", "learner.colocated=true"):
        assert load(file, [same]).config.digest() == digest, same
    for other in (
        "actor.reward=exact",
        "learner.optimizer.lr=1",
        "seed=3",
        "sampling.max_new_tokens=3",
        "prepare.task=sort",
    ):
        assert load(file, [other]).config.digest() != digest, other


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("learner=3", "--set: learner: want a map of settings, such as {steps: ...}, got 3"),
        ("learner.optimizer=[]", "learner.optimizer: want a map of settings"),
        ("bus={prt: 3}", "bus.prt: no such setting; did you mean bus.port?"),
        ("sampling.temperature=.nan", "sampling.temperature: want a finite number, got nan"),
        ("run=a.b", "run: want 1 to 64 of"),
        ("learner.steps", "want path.to.key=value"),
        ("learner.steps.x=1", "learner.steps: want a whole number, such as 3, got {"),
        ("learner.step=1", "did you mean learner.steps"),
        ("learner.steps=[", "--set learner.steps: not YAML: "),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, setting: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(write(tmp_path, ""), [setting])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["learner.algorithm.correction=none"], "train_without_correction"),
        (
            ["learner.algorithm.kl.coef=0.1", "learner.algorithm.kl.target=0.1", "learner.algorithm.kl.horizon=2"],
            "want > 0.2 x samples per step",
        ),
        (["sampling.top_p=0.9"], "truncated"),
        (["sampling.top_k=5"], "truncated"),
        (["sampling.top_k=-5"], "sampling: want top_p 1 and top_k -1"),
        (["sampling.temperature=0"], "--set: sampling.temperature: want >= 0.01"),
        (["weights.push_every=4", "staleness.max_lag=2"], "push_every: want <= staleness.max_lag"),
        (
            ["weights.push_every=3", "staleness.max_lag=2", "learner.checkpoint_every=20"],
            "multiple of weights.push_every",
        ),
        (["learner.colocated=true", "weights.overlap=true"], "weights.overlap: want false with learner.colocated"),
        (
            ["learner.group_size=1", "learner.algorithm.advantage=reinforce", "staleness.filter_zero_variance=true"],
            "staleness.filter_zero_variance: want learner.group_size >= 2",
        ),
        (
            ["learner.group_size=1", "learner.algorithm.advantage=reinforce", "data.filters.f=equal_rewards"],
            "data.filters.f: want learner.group_size >= 2",
        ),
        (["data.filters.f.use=nosuch"], "filters.f.use: want equal_rewards"),
        (["staleness.over_sampling=-1"], "over_sampling: want >= 0, got -1"),
        (
            ["learner.algorithm.overlong.buffer=100", "sampling.max_new_tokens=6"],
            "overlong.buffer: want <= sampling.max_new_tokens = 6",
        ),
        (
            [
                "learner.algorithm.overlong.buffer=100",
                "rollouts.r.use=multi_turn",
                "data.rollout=r",
                "rollouts.r.budget.tokens=50",
            ],
            "overlong.buffer: want <= rollouts.r.budget.tokens = 50, got 100",
        ),
        (
            ["learner.algorithm.overlong.buffer=4", "rollouts.r.use=multi_turn", "data.rollout=r"],
            "rollouts.r.budget.tokens: want > 0 with learner.algorithm.overlong.buffer",
        ),
        (
            ["learner.algorithm.aggregation=constant", "rollouts.r.use=multi_turn", "data.rollout=r"],
            "rollouts.r.budget.tokens: want > 0 with learner.algorithm.loss_constant: 0",
        ),
        (
            ["actor.reward=by_rollout"],
            "actor.reward: want the reward of rows without a program, got by_rollout: data has such rows",
        ),
        (["learner.algorithm.distill.coef=1"], "distill.coef: want learner.algorithm.kl.reference"),
        (
            ["learner.hooks.before_log_probs=mine:hook"],
            "before_log_probs: want a run with a pass for log-probs .* 'mine:hook', which would",
        ),
        (["learner.hooks.before_step=mine"], "learner.hooks.before_step: want module:function, got 'mine'"),
        (["engine.colocated=true"], "engine.colocated: follows from learner.colocated"),
        (["engine.routed_experts=true"], "engine.routed_experts: follows from learner.routing_replay"),
        (
            ["learner.routing_replay=rollout", "actor.routed_experts=false"],
            "actor.routed_experts: follows from learner.routing_replay",
        ),
        (
            ["learner.routing_replay=rollout", "engine.sglang.arguments.enable_return_routed_experts=false"],
            "engine.sglang.arguments.enable_return_routed_experts: want true",
        ),
        (
            ["learner.colocated=true", "engine.kind=sglang", "engine.sglang.url=http://x"],
            "engine.sglang.url: want a server",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(tmp_path: Path, settings: list[str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(write(tmp_path, ""), settings)


@pytest.mark.parametrize(
    "setting", ["learner.minibatches=2", "weights.push_every=2", "learner.algorithm.m2.limit=0.04"]
)
def test_a_hook_before_log_probs_needs_a_pass_for_them(tmp_path: Path, setting: str) -> None:
    hook = "learner.hooks.before_log_probs=mine:hook"
    more = ["staleness.max_lag=2", "learner.checkpoint_every=4"]
    load(write(tmp_path, ""), [hook, setting, *more])
    with refusal(SettingsError, place="--set: learner.hooks.before_log_probs"):
        load(write(tmp_path, ""), [hook, *more])


def test_training_without_correction_needs_a_second_setting_only_when_asynchronous(tmp_path: Path) -> None:
    file = write(tmp_path, "learner: {algorithm: {correction: none}}")
    load(file, ["staleness.max_lag=0"])
    load(file, ["learner.algorithm.train_without_correction=true"])


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configurations_are_good(file: Path) -> None:
    assert load(file).config.run == file.stem


def test_every_setting_is_explained() -> None:
    """Each section's source has a docstring, and its names are those of the dataclass."""
    for field in dataclasses.fields(RunConfig):
        default = getattr(RunConfig(), field.name)
        if dataclasses.is_dataclass(default):
            assert type(default).__doc__, field.name


@pytest.mark.parametrize("given", ["[fd77::10]", "[::1]:30000", "fd77::10", "[fe80::1%eth0]"])
def test_an_ipv6_address_is_text_with_and_without_brackets(given: str) -> None:
    loaded = load([], [f"engine.advertise={given}"], {"TIDEMILL_WEIGHTS__ADVERTISE": given})
    assert (loaded.config.engine.advertise, loaded.config.weights.advertise) == (given, given)


def test_a_list_in_brackets_is_still_a_list() -> None:
    assert load([], ["sampling.stop=[a:b:c, d]", "learner.devices=[0, 1]"]).config.sampling.stop == ("a:b:c", "d")


DIGESTS = {
    "arithmetic": "bd52984423ff9a8b",
    "arithmetic_rl": "dba14e8a7ad5b130",
    "calculator": "b0094a9549cd9247",
    "calculator_sft": "82f06fa101d2a782",
    "digits": "140be8308ce683a1",
    "digits_ppo": "2572e100b0e494a7",
    "distil": "99fc30357b93bb4f",
    "gsm8k": "9ac227586db94c48",
    "gsm8k_smollm2": "fc7eafff3163e433",
    "real": "e69cce4a17e106e3",
    "sft": "ff6a6a4e1ff628d4",
    "sglang-cpu": "617d9e80148856c3",
    "smoke": "7df063a5166a7579",
    "teacher": "d0cceb5199dee967",
    "tools": "4604d40adc2e7413",
    "walk": "554cca562c05e35e",
    "warm_rl": "e2bdd26409162afb",
}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_settings_that_came_later_leave_the_digests_of_former_runs(file: Path) -> None:
    """A new setting stands in ``_LATER_...`` with its default. Change a digest here only with the file of this name."""
    assert load(file, (), {}).config.digest()[:16] == DIGESTS[file.stem]


def test_entries_of_maps_are_in_the_digest_as_they_are_written(tmp_path: Path) -> None:
    """So that the runs of former releases have the digests that they recorded: short and whole forms differ."""
    settings = [
        "data.sources={a: {path: a.jsonl}}",
        "data.filters={f: length}",
        "actor.reward_parts={x: exact, y: {reward: length}}",
    ]
    config = load(write(tmp_path, ""), settings).config
    assert config.digest()[:16] == "67f15b94e50dc4ea"
    assert load(write(tmp_path, ""), [*settings, "data.filters={f: {use: length}}"]).config.digest() != config.digest()
    assert from_map(to_map(config), "test") == config


def test_all_errors_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "learner:\n  steps: 0\n  stepz: 1\ndata:\n  filters:\n    f: {use: length, workers: many}\n")
    with pytest.raises(SettingsError) as error:
        load(file)
    lines = str(error.value).splitlines()
    assert [line.partition(": want")[0] for line in lines[:2]] == [
        f"{file}:6: data.filters.f.workers",
        f"{file}:2: learner.steps",
    ]
    assert lines[2:] == [f"{file}:3: learner.stepz: no such setting; did you mean learner.steps?"]
