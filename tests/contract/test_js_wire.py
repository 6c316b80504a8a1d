"""The wire format of the JavaScript actor: read by the learner's side, and by struct and msgpack alone."""

import json
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.bus_kit import join, make_task
from tests.js_kit import installed
from tests.npm_kit import node
from tidemill.bus.errors import WireError
from tidemill.bus.streams.samples import headers_of
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_task
from tidemill.bus.wire.messages import Sample, Sampling, Span, Task, Timings

SCRIPT = Path(__file__).with_name("js_wire.mjs")
PROMPT_TOKENS = (0, 65_536, 2**31 - 1)
SEED = 2**62 + 1
LABEL = {
    "large": 2**63 - 1,
    "unsigned": 2**64 - 1,
    "negative": -(2**63),
    "half": 0.5,
    "one": 1.0,
    "bytes": b"\0\xff",
    "list": [None, True, "ß"],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of the script for a task."""
    task = Task(
        run="r-1",
        epoch=2**33,
        prompt=[{"role": "user", "content": "1+1?"}],
        prompt_tokens=np.array(PROMPT_TOKENS, np.int32),
        group_size=2,
        sampling=Sampling(temperature=0.7, top_p=1.0, top_k=40, stop=("\n",), stop_token_ids=(3,), seed=SEED),
        prompt_epoch=0,
        offset=2**40,
        label=LABEL,
        metadata={"id": 2**53 + 1},
    )
    directory = installed(tmp_path_factory.mktemp("js"), SCRIPT)
    command = [node(), SCRIPT.name]
    done = subprocess.run(command, cwd=directory, input=encode_task(task), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def payload(told: dict[str, Any]) -> bytes:
    return bytes.fromhex(told["tried"][0]["payload"])


def test_the_sample_is_read_as_it_was_meant(payload: bytes) -> None:
    sample = decode_sample(payload)
    check_sample(sample)
    assert (sample.task, sample.index, sample.group_size, sample.attempt, sample.run) == (
        2**53 - 1,
        1,
        2,
        "n0nce",
        "r-1",
    )
    np.testing.assert_array_equal(sample.tokens, np.array([*PROMPT_TOKENS, 7, 8, 9], np.int32))
    np.testing.assert_array_equal(sample.rollout_log_probs, np.array([-0.1, 0, -1e-40], np.float32))
    np.testing.assert_array_equal(sample.loss_mask, np.array([1, 0, 1], np.uint8))
    assert sample.spans == (Span(version=3, num_tokens=2), Span(version=4, num_tokens=1))
    assert sample.sampling == Sampling(
        temperature=0.7, top_p=1.0, top_k=40, stop=("\n",), stop_token_ids=(3,), seed=SEED
    )
    assert sample.timings == Timings(queued_s=0.0, generating_s=0.5, tools_s=0.0, reward_s=1.0)
    assert (sample.reward, sample.score, sample.created_s) == ({"score": 1.0, "format": 0.25}, 1.0, 1795000000.25)
    assert (sample.response, sample.extra) == ("tide – мельница 𝄞", {})


def test_fields_passed_through_come_back_equal(payload: bytes) -> None:
    """Integers of 64 bits are equal to the last digit; a float that is whole may become an integer."""
    sample = decode_sample(payload)
    assert sample.label == LABEL
    assert sample.metadata == {"id": 2**53 + 1}
    assert sample.prompt == [{"role": "user", "content": "1+1?"}]


def test_the_bytes_have_the_documented_form(payload: bytes) -> None:
    fields = msgpack.unpackb(payload)
    assert list(fields)[:2] == ["schema", "type"]
    assert fields["tokens"] == struct.pack("<6i", *PROMPT_TOKENS, 7, 8, 9)
    assert fields["rollout_log_probs"] == struct.pack("<3f", -0.1, 0, -1e-40)
    assert fields["loss_mask"] == b"\1\0\1"
    assert all(type(fields[name]) is int for name in ("schema", "task", "index", "group_size", "response_length"))
    assert type(fields["sampling"]["seed"]) is int
    assert type(fields["created_s"]) is float


def test_subject_headers_and_seed_are_ours(told: dict[str, Any], payload: bytes) -> None:
    sample = decode_sample(payload)
    assert told["subject"] == subjects.sample("r-1", sample.kind, 3, "js.1") == "tm.r-1.sample.train.3.js_1"
    assert told["headers"] == headers_of(sample)
    assert json.loads(told["seed"]) == {"seed": SEED + 1}


def test_parts_of_the_js_actor_join(told: dict[str, Any], payload: bytes) -> None:
    manifest = codec.read_manifest(bytes.fromhex(told["manifest"]), seq=2**33, max_payload=1224)
    pieces = [bytes.fromhex(piece) for piece in told["pieces"]]
    assert [len(piece) for piece in pieces[:-1]] == [100] * (len(pieces) - 1)
    assert manifest.seqs == tuple(2**32 + number for number in range(len(pieces)))
    assert join(manifest, pieces) == payload


def test_the_js_actor_refuses_what_the_learner_refuses(told: dict[str, Any]) -> None:
    assert len(told["tried"]) == 20
    for tried in told["tried"]:
        assert (not tried["reason"]) == valid(bytes.fromhex(tried["payload"])) == (tried["name"] == "as it is"), tried


def test_the_js_actor_refuses_a_task_of_a_rollout_by_name() -> None:
    """It never leases one: such tasks are on other subjects. Sent one all the same, it must not answer it with a single
    turn.
    """
    with tempfile.TemporaryDirectory() as directory:
        task = encode_task(make_task(rollout="calc"))
        done = subprocess.run(
            [node(), SCRIPT.name], cwd=installed(Path(directory), SCRIPT), input=task, capture_output=True, timeout=60
        )
    assert done.returncode != 0
    assert "want schema 1 and type task, got 2 and task" in done.stderr.decode()


def valid(payload: bytes) -> bool:
    sample = decode_sample(payload)
    assert isinstance(sample, Sample)
    try:
        check_sample(sample)
    except WireError:
        return False
    return True
