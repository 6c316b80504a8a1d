"""``tidemill data import``: recorded samples and responses from outside as rows of recorded responses, one row a group.

    recordings (*.tide), JSON lines --read--> groups --checked--> rows (JSON lines) for a rollout with ``use: dataset``

Reads files alone: a run trains the rows like any others, in an order of its own, each as often as its passes state
(docs/sft.md).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.errors import WireError
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.codec import check_sample, decode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Kind, Sample, Status
from tidemill.launch.samples.recording import Recording
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.formats import read_values
from tidemill.learner.prompts.responses import KNOWN, listed, responses_in
from tidemill.learner.prompts.rows import row_of

SUFFIX = ".tide"
_RIGHT = (Status.COMPLETED, Status.TRUNCATED)
_OF_ROW = ("prompt", "label", "metadata", "group", "response", "responses")
"""Keys of a line besides the keys of its response."""


@dataclass(slots=True)
class ImportedRows:
    """The groups read so far, in the order of their first responses."""

    groups: dict[object, JsonObject] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that are in no row, by reason."""
    _seen: set[tuple[object, int]] = field(default_factory=set)

    def add_sample(self, file: str, sample: Sample) -> None:
        """Add a sample of a recording, or count the reason for which it is left out."""
        group = (file, sample.run, sample.task)
        if reason := _unfit(sample):
            self.left_out[reason] += 1
        elif (group, sample.index) in self._seen:
            self.left_out["duplicate"] += 1
        else:
            self._seen.add((group, sample.index))
            row = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata, "responses": []}
            row["sampling"] = {"temperature": sample.sampling.temperature}
            self.groups.setdefault(group, row)["responses"].append(_response(sample))

    def add_line(self, where: str, file: str, number: int, values: JsonObject) -> None:
        """Add a line from outside. Raises PromptError."""
        if unknown := sorted(set(values) - {*_OF_ROW, *KNOWN}):
            raise PromptError(where, f"only {', '.join((*_OF_ROW, *KNOWN))} in a line", unknown[0])
        new_row = row_of(where, number, {"label": None, "metadata": None, **values}, ("prompt", "label", ""))
        recorded = {name: values[name] for name in KNOWN if name in values}
        if sum(map(bool, (recorded and "response" not in values, "response" in values, "responses" in values))) != 1:
            want = "one of response, responses, and text, messages or tokens in a line"
            raise PromptError(where, want, ", ".join(sorted(values)))
        if "response" in values:
            recorded = {"text": values["response"], **recorded}
        responses = listed(values.get("responses", [recorded]))
        responses_in({"responses": responses}, "responses", where=where)
        key = (
            (file, json.dumps(values["group"], sort_keys=True, default=str))
            if values.get("group") is not None
            else (file, number)
        )
        new = {
            "prompt": new_row.prompt,
            "label": new_row.label,
            "metadata": values.get("metadata") or {},
            "responses": [],
        }
        row = self.groups.setdefault(key, new)
        if row["prompt"] != new_row.prompt:
            raise PromptError(where, f"the prompt of its group, {row['prompt']!r:.80}", f"{new_row.prompt!r:.80}")
        row["responses"] += responses


def import_files(paths: Sequence[str], out: Path) -> list[str]:
    """Write the rows of all files to ``out``. Returns the result in words. Raises PromptError, ValueError."""
    if out.suffix != ".jsonl":
        raise ValueError(f"--out: want a file that ends in .jsonl, got {out}")
    rows = ImportedRows()
    for path in _files([Path(argument) for argument in paths]):
        if path.suffix == SUFFIX:
            _read_recording(path, rows)
        else:
            _read_lines(path, rows)
    if not rows.groups:
        raise ValueError(f"want at least one response to train, got none{_counts(rows.left_out)}")
    write_whole(out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows.groups.values()))
    sizes = [len(row["responses"]) for row in rows.groups.values()]
    num_with_log_probs = sum(
        all("log_probs" in response for response in row["responses"] if isinstance(response, dict))
        for row in rows.groups.values()
    )
    words = [f"{out}: {len(sizes)} rows, {sum(sizes)} responses{_counts(rows.left_out)}"]
    if num_with_log_probs < len(sizes):
        cure = "only cross-entropy trains them (correction: sft, sft_coef)"
        words.append(f"{len(sizes) - num_with_log_probs} rows have responses without log_probs: {cure}")
    if single := sizes.count(1):
        words.append(
            f"{single} rows have one response: an estimator that compares the samples of a group gives them "
            "no advantage"
        )
    return words


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: want recordings (*{SUFFIX}) in it, got none")
        yield from files


def _read_recording(path: Path, rows: ImportedRows) -> None:
    recording = Recording.open(path)
    try:
        for stored in recording:
            try:
                if isinstance(stored.data, WireError):
                    raise stored.data
                sample = decode_sample(stored.data)
                check_sample(sample)
            except WireError:
                rows.left_out["invalid"] += 1
                continue
            rows.add_sample(recording.origin.created, sample)
    finally:
        recording.close()


def _read_lines(path: Path, rows: ImportedRows) -> None:
    for number, (where, values) in enumerate(read_values(path)):
        if isinstance(values, PromptError):
            raise values
        rows.add_line(where, str(path), number, dict(values))


def _unfit(sample: Sample) -> str:
    if sample.kind is not Kind.TRAIN:
        return sample.kind.value
    if sample.status not in _RIGHT:
        return sample.status.value
    if len(sample.sizes) > 1:
        return "several sequences"
    if not sample.loss_mask.any() or sample.response_length == len(sample.tokens):
        return "nothing to train"
    return ""


def _response(sample: Sample) -> JsonObject:
    first = len(sample.tokens) - sample.response_length
    response: JsonObject = {
        "tokens": sample.tokens[first:].tolist(),
        "prompt_tokens": sample.tokens[:first].tolist(),
        "reward": sample.reward,
        "temperature": sample.sampling.temperature,
    }
    if not sample.demonstration:
        response["log_probs"] = [min(0.0, float(log_prob)) for log_prob in sample.rollout_log_probs]
    if not sample.loss_mask.all():
        response["loss_mask"] = sample.loss_mask.tolist()
    if sample.status is Status.TRUNCATED:
        response["truncated"] = True
    return response


def _counts(left_out: Counter[str]) -> str:
    return (
        "; left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        if left_out
        else ""
    )
