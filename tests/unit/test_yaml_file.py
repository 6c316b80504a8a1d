"""The loader returns a configuration for any file, or raises a SettingsError of one line that names the file."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.refusals import refusal
from tidemill.launch.cli.inputs import given_options
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.launch.settings.run_config import RunConfig

GOOD = (Path(__file__).resolve().parents[2] / "launch/configs/digits.yaml").read_bytes()
PIECES = (
    *(
        "&x ",
        "*x",
        "<<: ",
        "<<: 3\n",
        "!!python/object/apply:os.system [ls]\n",
        "!!binary a",
        "!!set {a}",
        "!!int x",
        "? [a]\n: b",
        "- ",
    ),
    *(
        "learner:",
        "steps:",
        "actor:",
        "reward_options:",
        "thresholds:",
        "numerics:",
        "alarms:",
        "algorithm:",
        "reject:",
        "sampling:",
        "stop:",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        ": ",
        "\n",
        "\n  ",
        "\n    ",
        "'",
        '"',
        "\t",
        "#",
        "|",
        ">",
        "%",
        "@",
        "---\n",
        "...\n",
        "\x00",
        "\ufeff",
        "\x85",
    ),
    *(
        "1e400",
        ".nan",
        "null",
        "~",
        "true",
        "0x",
        "1_0",
        "1:30",
        "2020-01-01",
        "2020-99-99",
        "9" * 400,
        "9" * 5000,
        "a",
        "é",
        "run",
        "bus",
    ),
)


@pytest.mark.parametrize(
    ("text", "where", "complaint"),
    [
        ("a: 1\nb: &x {c: *x}\n", ":2: b.c: ", "want a value, got a reference to what it is in"),
        ("learner:\n  <<: 3\n", ":2", "expected a mapping"),
        ("seed: !!python/object/apply:os.getpid []\n", ":1", "could not determine a constructor"),
        ("run: x\nactor: {reward_options: {a: !!set {b}}}\n", ":2", "could not determine a constructor"),
        ("run: x\nseed: !!int x\n", ":1", "not YAML: invalid literal"),
        ("? [a]\n: 3\n", ":1", "want names as keys"),
        ("[" * 5000, ":1", "nested too deeply"),
        ("seed: 3\nrun: a\x00b\n", ":2", "printable text"),
        ("learner: {steps: 3\n", ":1", "not YAML: while parsing a flow mapping"),
        ("learner:\n  steps: 3\n oops: 4\n", ":3", "not YAML"),
        (
            "a: &a [x, x, x, x]\n"
            + "".join(f"{n}: &{n} [*{p}, *{p}, *{p}, *{p}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)),
            ":",
            "values, got more",
        ),
    ],
    ids=["itself", "merge", "tag", "set", "int", "key", "deep", "nul", "open", "indent", "bomb"],
)
def test_a_defect_is_one_line_with_file_and_line(tmp_path: Path, text: str, where: str, complaint: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(complaint)) as error:
        load(file)
    assert str(error.value).startswith(f"{file}{where}")
    assert "\n" not in str(error.value)


def test_a_byte_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"seed: 3\nrun: caf\xe9\n")
    with refusal(SettingsError, place=f"{file}:2", got="the byte 0xe9"):
        load(file)


def test_a_date_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: 2020-01-01\nactor: {reward_options: {since: 2020-01-01}}\n")
    config = load(file).config
    assert (config.run, config.actor.reward_options) == ("2020-01-01", {"since": "2020-01-01"})


def test_anchors_and_merges_are_supported(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("learner: &x {steps: 3}\nactor: {reward_options: {<<: *x, more: 1}}\n")
    assert load(file).config.actor.reward_options == {"steps": 3, "more": 1}


NUMBERS = {
    "010": 10,
    "-017": -17,
    "+7": 7,
    "007": 7,
    "0o10": 8,
    "0x1F": 31,
    "1e3": 1000.0,
    "1.": 1.0,
    ".5": 0.5,
    "-.5e-1": -0.05,
    "true": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "12:30": "12:30",
    "1:30:00": "1:30:00",
    "12:30.5": "12:30.5",
    "1_000": "1_000",
    "1_000.5": "1_000.5",
    "0b11": "0b11",
    "0o8": "0o8",
    "-0x1F": "-0x1F",
    "yes": "yes",
    "No": "No",
    "on": "on",
    "OFF": "OFF",
    "y": "y",
    "2020-01-01": "2020-01-01",
    "2020-01-01 12:30:00": "2020-01-01 12:30:00",
    "=": "=",
    "nUll": "nUll",
    "1e": "1e",
    "'010'": "010",
}
"""Scalars and their values in the core schema of YAML 1.2."""


@pytest.mark.parametrize(("text", "want"), NUMBERS.items(), ids=NUMBERS.keys())
def test_scalars_are_those_of_yaml_1_2_in_files_and_arguments_alike(tmp_path: Path, text: str, want: object) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: x\nactor: {{reward_options: {{a: {text}, b: [0, {text}]}}}}\n")
    (tmp_path / "empty.yaml").write_text("run: x\n")
    given = [
        load(file).config,
        load(tmp_path / "empty.yaml", [f"actor.reward_options.a={text}", f"actor.reward_options.b=[0, {text}]"]).config,
        load(tmp_path / "empty.yaml", [f"actor.reward_options={{a: {text}, b: [0, {text}]}}"]).config,
        load(tmp_path / "empty.yaml", [], {"TIDEMILL_ACTOR__REWARD_OPTIONS": f"{{a: {text}, b: [0, {text}]}}"}).config,
    ]
    for config in given:
        assert repr(config.actor.reward_options) == repr({"a": want, "b": [0, want]})
    assert repr(given_options([f"a={text}"])) == repr({"a": want})


@pytest.mark.parametrize("text", ["12:30", "1_000", "yes", "0b11", "2020-01-01", "1e3"])
def test_what_is_no_whole_number_in_yaml_1_2_is_refused_for_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"learner: {{steps: {text}}}\n")
    with refusal(SettingsError, place=f"{file}:1: learner.steps"):
        load(file)
    file.write_text("")
    with refusal(SettingsError, place="--set: learner.steps"):
        load(file, [f"learner.steps={text}"])
    if text != "1e3":
        with refusal(SettingsError, place="--set: learner.optimizer.lr"):
            load(file, [f"learner.optimizer.lr={text}"])


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "1", "'true'"])
def test_a_switch_is_true_or_false(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"data: {{shuffle: {text}}}\n")
    with refusal(SettingsError, place=re.compile(r"data\.shuffle$")):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize("text", ["007", "0x10", "1.50", "1e3", "12:30", "1_000", "no", "2020-01-01", "+7"])
def test_a_number_for_a_text_keeps_its_characters(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{label_key: {text}}}\nsampling: {{stop: [a, {text}]}}\n")
    config = load(file).config
    assert (config.data.label_key, config.sampling.stop) == (text, ("a", text))
    file.write_text("")
    config = load(file, [f"data={{label_key: {text}}}", f"sampling.stop=[a, {text}]"]).config
    assert (config.data.label_key, config.sampling.stop) == (text, ("a", text))
    assert load(file, [], {"TIDEMILL_DATA__LABEL_KEY": text}).config.data.label_key == text


@pytest.mark.parametrize(
    "value", [*NUMBERS.keys(), *NUMBERS.values(), "", " a", "a: b", "é\n", ["010", 1e-5, None], {"010": "yes"}]
)
def test_a_written_value_is_read_as_it_was(tmp_path: Path, value: object) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml_file.dump({"a": value}), encoding="utf-8")
    assert yaml_file.read(file)[0] == {"a": value}
    assert yaml_file.value(yaml_file.dump(value, flow=True), "here")[0] == value


def refuses_or_loads(file: Path) -> None:
    try:
        config = load(file).config
    except SettingsError as error:
        # One line for each wrong setting: a file of a section with the keys of another one has several.
        assert all(line.startswith(str(file)) for line in str(error).split("\n")), error
    else:
        assert isinstance(config, RunConfig)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(data=st.binary(max_size=60))
def test_bytes(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.yaml"
    file.write_bytes(data)
    refuses_or_loads(file)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_pieces_of_yaml(pieces: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "pieces.yaml"
    file.write_text("".join(pieces))
    refuses_or_loads(file)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    place=st.integers(0, len(GOOD)),
    cut=st.integers(0, 30),
    piece=st.one_of(st.sampled_from(PIECES).map(str.encode), st.binary(max_size=4)),
)
def test_a_good_file_with_something_else_in_one_place(
    place: int, cut: int, piece: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(GOOD[:place] + piece + GOOD[place + cut :])
    refuses_or_loads(file)


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    path=st.sampled_from(
        [
            "learner.algorithm.alarms.thresholds",
            "learner.algorithm.reject.rules",
            "actor.reward_options",
            "learner",
            "seed",
            "bus.url",
        ]
    ),
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["numerics", "k3", "steps", "a"]), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)
def test_any_value_of_a_setting(path: str, value: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "empty.yaml"
    file.write_text("")
    try:
        load(file, [f"{path}={yaml_file.shown(value)}"])
    except SettingsError as error:
        assert "--set" in str(error) or path.partition(".")[0] in str(error)
