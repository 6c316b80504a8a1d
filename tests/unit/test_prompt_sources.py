"""Sources of prompts: slices, weights, Arrow directories, and rows that no task can carry."""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.refusals import refusal
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.data import DataConfig, Source
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.prompts.rows import PromptRow, RowRules, scan_rows


def letters(prompt: Prompt) -> Sequence[int]:
    return [ord(letter) for letter in str(prompt)]


def read_rows(source: Source) -> Iterator[PromptRow]:
    """Yield the rows of a source; raise the error of the first bad one."""
    for row in scan_rows(source):
        if isinstance(row, PromptError):
            raise row
        yield row


def write(path: Path, count: int, word: str = "question") -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": f"{word} {number}", "label": number}) + "\n" for number in range(count))
    )
    return path


def save_arrow(directory: Path, parts: Sequence[Sequence[dict[str, Any]]]) -> Path:
    """Write files as ``Dataset.save_to_disk`` of datasets 4 does: Arrow streams and state.json."""
    directory.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(list(rows))
        with pyarrow.OSFile(str(directory / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (directory / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    return directory


def opened(data: DataConfig, max_tokens: int = 1000) -> PromptFile:
    rules = RowRules(policy=data.bad_rows)
    return PromptFile(
        data.used, tokenize=letters, max_tokens=max_tokens, shuffle=data.shuffle, seed=data.seed, rules=rules
    )


def drawn(prompts: PromptFile, count: int, epoch: int = 0, offset: int = 0) -> list[tuple[int, int, Prompt, object]]:
    found = []
    for _ in range(count):
        one = prompts.after(epoch, offset)
        found.append((one.epoch, one.offset, one.row.prompt, one.row.label))
        epoch, offset = one.epoch, one.offset + 1
    return found


def test_one_whole_file_has_the_sequence_and_digest_of_former_releases(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", 500)
    prompts = opened(DataConfig(path=str(path), template="{prompt}?", seed=7), max_tokens=11)
    sequence = "".join(f"{epoch} {offset} {prompt} {label}\n" for epoch, offset, prompt, label in drawn(prompts, 250))
    # Both were computed with the release before there were sources.
    assert (hashlib.sha256(sequence.encode()).hexdigest()[:16], prompts.digest) == (
        "c8089eda4dfa305b",
        "43280a028fd2a086",
    )


@pytest.mark.parametrize(
    ("part", "want"),
    [
        ("[2:4]", [2, 3]),
        ("[:2]", [0, 1]),
        ("[8:]", [8, 9]),
        ("[-2:]", [8, 9]),
        ("[:-8]", [0, 1]),
        ("[5:99]", [5, 6, 7, 8, 9]),
    ],
)
def test_a_slice_is_that_of_python(tmp_path: Path, part: str, want: list[int]) -> None:
    path = write(tmp_path / "prompts.jsonl", 10)
    rows = list(read_rows(Source.at(f"{path}@{part}")))
    assert [row.label for row in rows] == want
    assert rows[0].where == f"{path}:{want[0] + 1}"  # the line of the file, not of the slice


def test_slices_and_weights_are_part_of_the_digest(tmp_path: Path) -> None:
    path = str(write(tmp_path / "prompts.jsonl", 10))
    configs = [
        DataConfig(path=path),
        DataConfig(path=f"{path}@[0:9]"),
        DataConfig(path=f"{path}@[1:10]"),
        DataConfig(path=path, system_prompt="be brief"),
        DataConfig(sources={"a": {"path": path, "weight": 2}}),
        DataConfig(sources={"a": {"path": path}, "b": {"path": path}}),
    ]
    assert len({opened(config).digest for config in configs}) == len(configs)


def test_a_pass_has_each_row_as_often_as_its_weight(tmp_path: Path) -> None:
    paths = {name: str(write(tmp_path / f"{name}.jsonl", 10, name)) for name in "abc"}
    data = DataConfig(
        sources={name: {"path": paths[name], "weight": weight} for name, weight in (("a", 1), ("b", 2.5), ("c", 0.3))}
    )
    prompts = opened(data)
    assert len(prompts) == 10 + 25 + 3
    passes = [Counter(prompt for _, _, prompt, _ in drawn(prompts, 38, epoch)) for epoch in range(10)]
    for counts in passes:
        assert Counter(str(prompt)[0] for prompt in counts.elements()) == {"a": 10, "b": 25, "c": 3}
        assert all(counts[f"a {number}"] == 1 and counts[f"b {number}"] in (2, 3) for number in range(10))
    # Ten passes go three times through the 10 rows of c, none before the others: every row has come as often.
    assert {sum(counts[f"c {number}"] for counts in passes) for number in range(10)} == {3}
    assert {sum(counts[f"b {number}"] for counts in passes[:2]) for number in range(10)} == {5}


def test_the_order_of_several_sources_is_a_function_of_seed_and_position(tmp_path: Path) -> None:
    sources = {
        name: {"path": str(write(tmp_path / f"{name}.jsonl", 7, name)), "weight": 0.5 + len(name)}
        for name in ("a", "bb")
    }
    data = DataConfig(sources=sources, seed=3)
    whole = drawn(opened(data), 100)
    for start in (
        0,
        1,
        17,
        60,
    ):  # a learner that was killed goes on from the position in its checkpoint, in a new process
        epoch, offset, _, _ = whole[start]
        assert drawn(opened(data), 100 - start, epoch, offset) == whole[start:]
    assert drawn(opened(DataConfig(sources=sources, seed=4)), 100) != whole


def test_a_source_has_keys_template_and_system_prompt_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1)
    (tmp_path / "b.jsonl").write_text('{"q": {"text": "2+2"}, "gold": 4}\n')
    other = {
        "path": f"{tmp_path}/b.jsonl",
        "prompt_key": "q.text",
        "label_key": "gold",
        "system_prompt": "be brief",
        "template": "Q: {prompt}",
    }
    prompts = opened(DataConfig(sources={"a": {"path": f"{tmp_path}/a.jsonl"}, "b": other}, shuffle=False))
    assert prompts.at(0, 0).row.prompt == "question 0"
    assert prompts.at(0, 1).row.prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Q: 2+2"},
    ]
    assert prompts.at(0, 1).row.label == 4


def test_a_system_message_of_the_row_stays(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": own, "label": 0}) + "\n")
    assert opened(DataConfig(path=f"{tmp_path}/a.jsonl", system_prompt="other")).at(0, 0).row.prompt == own


def test_a_directory_of_the_real_library_is_read() -> None:
    """Written by datasets 5.2.0: Dataset.from_list(six rows).save_to_disk(..., num_shards=2)."""
    directory = Path(__file__).parents[1] / "data" / "datasets-5.2.0"
    (source,) = DataConfig(path=f"{directory}@[1:]", label_key="reward_model.ground_truth", tools_key="tools").used
    rows = list(read_rows(source))
    assert [row.label for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0].prompt == [{"role": "user", "content": "what is 1?"}]
    assert [[tool["function"]["name"] for tool in row.tools] for row in rows] == [["plus"], [], ["plus"], [], ["plus"]]


def test_a_directory_of_datasets_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}"}], "reward_model": {"ground_truth": str(n)}} for n in range(5)
    ]
    path = save_arrow(tmp_path / "set" / "train", [rows[:2], rows[2:]])
    found = list(read_rows(Source.at(f"{path}@[1:4]", keys=("prompt", "reward_model.ground_truth", ""))))
    assert [(row.prompt, row.label) for row in found] == [
        (row["prompt"], str(n)) for n, row in list(enumerate(rows))[1:4]
    ]
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with refusal(PromptError, where=re.compile(r"set$")):
        list(read_rows(Source.at(str(tmp_path / "set"))))


def shards(
    directory: Path, suffix: str, counts: Sequence[int], form: str = "train-{number:05d}-of-{of:05d}"
) -> list[Path]:
    """Write shards whose rows are counted through all of them."""
    directory.mkdir(parents=True, exist_ok=True)
    paths, first = [], 0
    for number, count in enumerate(counts):
        rows = [{"prompt": f"question {one}", "label": one} for one in range(first, first + count)]
        paths.append(directory / (form.format(number=number, of=len(counts)) + suffix))
        if suffix == ".jsonl":
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[-1])
        first += count
    return paths


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", ["train-{number:05d}-of-{of:05d}", "part_{number}", "{number:04d}"])
def test_shards_are_one_source_in_the_order_of_their_names(tmp_path: Path, suffix: str, form: str) -> None:
    """As a directory and as a pattern, with a slice over the boundary of two; other files beside them are passed
    over.
    """
    directory = tmp_path / "set"
    written = shards(directory, suffix, [2, 3, 1], form)
    for name in ("README.md", f".hidden{suffix}", "dataset_infos.json"):
        (directory / name).write_text("none")
    for path in (directory, directory / f"*{suffix}", tmp_path / "s?t" / f"*{suffix}"):
        rows = list(read_rows(Source.at(str(path))))
        assert [(row.number, row.label) for row in rows] == [(number, number) for number in range(6)]
        assert [row.where for row in rows[1:3]] == [f"{written[0]}:2", f"{written[1]}:1"]
        for part, want in (("[1:4]", [1, 2, 3]), ("[-2:]", [4, 5])):
            assert [row.label for row in read_rows(Source.at(f"{path}@{part}"))] == want
    one = write(tmp_path / "one.jsonl", 6)
    assert drawn(opened(DataConfig(path=str(directory))), 20) == drawn(opened(DataConfig(path=str(one))), 20)


def test_the_digest_has_every_shard(tmp_path: Path) -> None:
    """A changed, an exchanged and a new shard make other prompts, wherever the directory is."""
    paths = shards(tmp_path / "a", ".jsonl", [2, 2], "part-{number}")
    shards(tmp_path / "b", ".jsonl", [2, 2], "part-{number}")
    of_directory, of_pattern = DataConfig(path=str(tmp_path / "a")), DataConfig(path=f"{tmp_path}/a/part-*")
    seen = [opened(of_directory).digest]
    assert opened(of_pattern).digest == opened(DataConfig(path=str(tmp_path / "b"))).digest == seen[0]
    contents = [path.read_bytes() for path in paths]
    for first, second in (contents[::-1], [contents[0], contents[1].replace(b"question", b"problem")]):
        for path, content in zip(paths, (first, second), strict=True):
            path.write_bytes(content)
        seen += [opened(of_directory).digest]
        assert opened(of_pattern).digest == seen[-1]
    (tmp_path / "a" / "part-2.jsonl").write_bytes(contents[0])
    seen.append(opened(of_directory).digest)
    for path in paths[1:]:
        path.unlink()
    (tmp_path / "a" / "part-2.jsonl").unlink()
    seen += [
        opened(of_directory).digest,
        opened(of_pattern).digest,
    ]  # the latter: that of the one file, as it has always been
    assert len(set(seen)) == 6


def test_a_bad_row_and_a_bad_file_are_named_with_their_shard(tmp_path: Path) -> None:
    paths = shards(tmp_path, ".jsonl", [2, 2])
    paths[1].write_text('{"prompt": "a", "label": 1}\n{"label": 2}\nno JSON\n')
    found = [str(one) for one in scan_rows(Source.at(str(tmp_path))) if isinstance(one, PromptError)]
    assert (
        len(found) == 2
        and f"{paths[1]}:2: want key 'prompt'" in found[0]
        and f"{paths[1]}:3: want a JSON map" in found[1]
    )
    tables = shards(tmp_path / "tables", ".parquet", [2, 2])
    tables[1].write_bytes(b"none")
    with refusal(PromptError, where=re.compile(re.escape(tables[1].name) + "$")):
        list(read_rows(Source.at(str(tmp_path / "tables"))))


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [
        (
            ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"],
            "",
            r"want shards of one name.*got those of 2; name one of them: .*/test-\*\.parquet, .*/train-\*\.parquet",
        ),
        (["train.jsonl", "test.jsonl"], "", r"got those of 2; name one of them: .*/test\.jsonl, .*/train\.jsonl"),
        (
            ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
            "",
            r"want all 3 shards train-\*\.jsonl, got 2 of them",
        ),
        (["a-0.jsonl", "a-1.parquet"], "", "want either .jsonl or .parquet files, got both"),
        (["a-0.jsonl", "a-1.csv"], "a-*", r"want either .jsonl or .parquet files, got .*a-1\.csv"),
        (["data/train.jsonl"], "*", "want either .jsonl or .parquet files, got .*/data"),
        (["data/train.jsonl"], "", "a directory without state.json and shards; in it are .*/data"),
        (["train.jsonl"], "test*", "want a file of prompts, got no file that matches"),
    ],
)
def test_files_that_may_not_belong_together_are_refused(
    tmp_path: Path, names: list[str], path: str, message: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a", "label": 1}\n')
    with pytest.raises(PromptError, match=message):
        list(read_rows(Source.at(str(tmp_path / path))))


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a[0].jsonl", 2)
    write(tmp_path / "a0.jsonl", 3)
    assert len(list(read_rows(Source.at(f"{path}@[0:2]")))) == 2


@pytest.mark.parametrize("name", ["../secret.arrow", "gone.arrow", 3])
def test_a_directory_names_no_files_outside_it(tmp_path: Path, name: object) -> None:
    path = save_arrow(tmp_path / "set", [[{"prompt": "a", "label": 1}]])
    (tmp_path / "secret.arrow").write_bytes(b"x")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with refusal(PromptError, where=str(path / "state.json"), want=re.compile("_data_files")):
        list(read_rows(Source.at(str(path))))


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with refusal(PromptError, got="a directory without state.json and shards"):
        list(read_rows(Source.at(str(tmp_path))))
    path = save_arrow(tmp_path / "set", [[{"prompt": "a", "label": 1}]])
    (path / "data-00000-of-00001.arrow").write_bytes(b"no arrow")
    with refusal(PromptError, where=re.compile(r"\.arrow$")):
        list(read_rows(Source.at(str(path))))
    (path / "state.json").write_text("[]")
    with refusal(PromptError, where=re.compile(r"/state\.json$"), got=re.compile("^TypeError: ")):
        list(read_rows(Source.at(str(path))))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "label": NaN}', r":2: want a JSON map, got .*NaN is not JSON; write null"),
        ('{"prompt": "a", "label": 1e999}', r":2: want finite numbers in 'label', got inf"),
        (
            '{"prompt": "a", "label": {"x": ["\\ud800"]}}',
            r":2: want Unicode text in 'label\.x', got half of a surrogate pair",
        ),
        ('{"prompt": "\\udc00", "label": 1}', r":2: want Unicode text in 'prompt'"),
        (
            '{"prompt": "a", "label": 123456789012345678901}',
            r":2: want whole numbers of 64 bits in 'label', got 21 digits; write it as text",
        ),
        ("[" * 100_000, r":2: want a JSON map"),
    ],
)
def test_rows_that_a_task_cannot_carry_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good", "label": 1}}\n{line}\n{{"prompt": "good", "label": 2}}\n')
    with pytest.raises(PromptError, match=message):
        list(read_rows(Source.at(str(path))))
    found = list(scan_rows(Source.at(str(path))))
    assert [isinstance(one, PromptError) for one in found] == [False, True, False]


def test_a_long_row_is_skipped_for_its_tokens_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "label": 1}) + "\n" for prompt in ("x" * 2_000_000, "short")))
    assert opened(DataConfig(path=str(path), shuffle=False), max_tokens=20).after(0, 0).row.prompt == "short"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "a.jsonl@[1:x]"}, {"where": "a.jsonl@[1:x]", "got": "'x' in it"}),
        (
            {"path": "a.jsonl", "sources": {"a": {"path": "b.jsonl"}}},
            {"place": "sources", "got": "both (path: 'a.jsonl')"},
        ),
        (
            {"sources": {"a": {"path": "b.jsonl", "wieght": 2}}},
            {"place": "sources.a.wieght"},
        ),
        ({"sources": {"a": {"path": "b.jsonl", "weight": 0}}}, {"place": "sources.a.weight", "got": "0"}),
        ({"sources": {"a": {"path": "b.jsonl", "weight": "2"}}}, {"place": "sources.a.weight", "got": "'2'"}),
        ({"sources": {"a": "b.jsonl"}}, {"place": "sources.a", "got": "'b.jsonl'"}),
        ({"sources": {"a": {"weight": 1}}}, {"place": "sources.a.path", "got": "nothing"}),
        ({"sources": {"a b": {"path": "b.jsonl"}}}, {"place": "sources.a b", "got": "'a b'"}),
        (
            {"chat_template_args": {"tools": []}},
            {"place": "chat_template_args", "got": "['tools'], which the program sets"},
        ),
        (
            {"chat_template_args": {"tokenize": False}},
            {"place": "chat_template_args", "got": "['tokenize'], which the program sets"},
        ),
    ],
)
def test_wrong_settings_are_refused_before_a_file_is_read(settings: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        DataConfig(**settings)


def test_a_weight_that_leaves_no_row_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", 10))
    with refusal(PromptError, where=str(path), got=re.compile(r"^0\.01;")):
        opened(DataConfig(sources={"a": {"path": path, "weight": 0.01}}))


ROWS = """
COUNT = 5

def rows():
    return ({"prompt": f"question {number}", "label": number} for number in range(COUNT))

def broken():
    yield {"prompt": "one", "label": 1}
    raise KeyError("no such table")

def unlike():
    return [{"prompt": "one", "label": 1}, "two", {"label": 3}]

def opaque():
    return [{"prompt": "one", "label": 1, "at": object()}]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module with functions that return rows."""
    name = f"rows_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_rows_of_a_function_are_those_of_a_file(module: str, tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.jsonl", 5)
    by_function, by_file = (opened(DataConfig(path=path, seed=3)) for path in (f"python:{module}:rows", str(file)))
    assert drawn(by_function, 12) == drawn(by_file, 12)
    assert [row.label for row in read_rows(Source.at(f"python:{module}:rows@[1:3]"))] == [1, 2]
    assert drawn(opened(DataConfig(sources={"a": {"path": f"python:{module}:rows"}, "b": {"path": str(file)}})), 10)


def test_the_digest_of_a_function_follows_its_rows(module: str) -> None:
    data = DataConfig(path=f"python:{module}:rows", seed=3)
    before = opened(data).digest
    assert opened(data).digest == before
    sys.modules[module].COUNT = 6  # type: ignore[attr-defined]
    assert opened(data).digest != before


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("python:no_such_module:rows", "cannot import no_such_module"),
        ("python:{}:no_such_function", "has no 'no_such_function'"),
        ("python:{}:COUNT", "COUNT is int"),
        ("python:{}", "no name in it"),
        ("python:{}:broken", r"broken:2: want a row, or the end, got KeyError: 'no such table'"),
        (
            "python:{}:opaque",
            r"want rows of JSON values with texts as keys, got Object of type object is not JSON serializable",
        ),
        ("python:{}:unlike", r"unlike:2: want a map, got str 'two'"),
    ],
)
def test_a_function_without_rows_is_refused_with_the_reason(module: str, path: str, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        opened(DataConfig(path=path.format(module), bad_rows="refuse"))


def test_every_bad_row_of_a_function_is_named(module: str) -> None:
    found = list(scan_rows(Source.at(f"python:{module}:unlike")))
    assert [isinstance(row, PromptError) for row in found] == [False, True, True]
    assert "unlike:3: want key 'prompt'" in str(found[2])
