"""Checksums on both sides of a push: a receiver with one flipped bit never serves it, and is named. Real engines, real
groups.
"""

import asyncio
import logging
import re
from pathlib import Path

import aiohttp
import pytest
import torch

from tests.engine_serving import Served, serving
from tests.integration.test_weightstore_publisher import DEADLINE_S, GOOD, publishing, state
from tests.receiver_app import Behaviour, digest, receivers, staged, tiny_tensors
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.bus.client.addresses import HERE
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.push.member import Member, Updated
from tidemill.weightstore.push.push import Push
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedModel


def test_a_receiver_with_one_flipped_bit_is_evicted_and_named(bus_url: str, run_id: str, tmp_path: Path) -> None:
    flips = Behaviour(fails="flip", at="checksums", only_once=True)
    with (
        receivers(bus_url, run_id, {"good": GOOD, "flips": flips}) as engines,
        publishing(bus_url, run_id, tmp_path) as publisher,
    ):
        first = publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
        assert (first.engines, first.verified) == (("good",), ("good",))
        assert first.evicted["flips"].startswith(
            "verify: version 1 differs from what was sent in 1 tensors: model.scale (float32): want sum64 "
        )
        assert state(engines["flips"][0])["version"] == 0
        # It comes back with the next push, as new; a verified engine is not checked again.
        second = publisher.publish(2, tiny_tensors(2).items(), wait=True).result(0)
        assert (second.engines, second.verified) == (("flips", "good"), ("flips",))
        assert [state(engines[id][0])["asked"] for id in ("good", "flips")] == [1, 2]
        assert state(engines["flips"][0])["digest"] == digest(tiny_tensors(2))


@pytest.mark.parametrize(("verify", "caught"), [("always", True), ("first", False), ("never", False)])
def test_checksums_are_compared_as_often_as_the_setting_requires(
    bus_url: str, run_id: str, tmp_path: Path, verify: str, caught: bool
) -> None:
    with (
        receivers(bus_url, run_id, {"a": GOOD}) as engines,
        publishing(bus_url, run_id, tmp_path, verify=verify) as publisher,
    ):
        reports = [publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0) for step in (1, 2, 3, 4)]
        assert [report.engines for report in reports] == [("a",)] * 4  # copies are used again, their sums are not
        assert [bool(report.verified) for report in reports] == [verify != "never", *[verify == "always"] * 3]
        assert state(engines["a"][0])["asked"] == {"never": 0, "first": 1, "always": 4}[verify]
    flips = Behaviour(fails="flip", at="checksums", once_served=1)
    with (
        receivers(bus_url, run_id, {"b": flips}),
        publishing(bus_url, run_id, tmp_path, verify=verify, epoch=2) as publisher,
    ):
        publisher.publish(5, tiny_tensors(5).items(), wait=True).result(0)
        assert ("b" in publisher.publish(6, tiny_tensors(6).items(), wait=True).result(0).evicted) == caught


def test_an_engine_without_checksums_serves_and_is_not_reported_as_verified(
    bus_url: str,
    run_id: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with receivers(bus_url, run_id, {"mute": Behaviour(mute=True)}), publishing(bus_url, run_id, tmp_path) as publisher:
        with caplog.at_level(logging.WARNING, logger="tidemill.weightstore.push.member"):
            report = publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0)
    assert (report.engines, report.verified) == (("mute",), ())
    assert "weights not verified" in caplog.text and "mute" in caplog.text


class Flipping(HttpReceiver):
    """The built-in engine with memory that loses a bit between the last bucket and the checksum request."""

    def __init__(self, served: Served, session: aiohttp.ClientSession, flipped: str) -> None:
        super().__init__(session, served.engine.url, epoch=1, deadlines=Deadlines(DEADLINE_S))
        self._served, self.flipped = served, flipped

    async def checksums(self, of: str = "update") -> ChecksumReport | None:
        standby = self._served.engine.updates.standby
        assert standby is not None
        if self.flipped:
            standby.named[self.flipped].view(-1).view(torch.uint8)[-1] ^= 1
        return await super().checksums()


@pytest.mark.parametrize(("family", "tied", "dtype"), [("qwen3", False, "float32"), ("qwen2", True, "bfloat16")])
async def test_the_built_in_engine_never_serves_a_flipped_bit(
    tmp_path: Path, family: str, tied: bool, dtype: str
) -> None:
    """This holds also where it keeps another dtype than was sent, and the output projection is the embedding under
    another name.
    """
    directory = write_tiny_model(tmp_path / "model", family, tied=tied)
    staging = staged(tiny_model(family, seed=1, tied=tied).state_dict())
    assert ("lm_head.weight" in staging.manifest.by_name) and staging.manifest.by_name[
        "model.norm.weight"
    ].dtype == "float32"
    async with serving(directory, dtype=dtype) as served:
        before = (await served.post("/weights_checksums", {}))[1]
        receiver = Flipping(served, served.session, "model.layers.1.self_attn.k_proj.weight")
        row = LiveRow(role="engine", id="e", host="test", pid=1, phase="serving", address=served.engine.url)
        for flipped in (receiver.flipped, ""):
            receiver.flipped = flipped
            member = Member(row, receiver, deadlines=Deadlines(DEADLINE_S))
            group = PushGroup(GroupRules(1, HERE, "gloo", Deadlines(DEADLINE_S)), [member])
            try:
                how = (
                    await Push(
                        1, staging.buckets, lambda _: StagedModel(staging, (), Deadlines(60.0)).differences
                    ).update(group)
                )[member]
                if flipped:
                    wrong = rf"verify: version 1 .* in 1 tensors: {flipped} \({dtype}\): want sum64"
                    assert isinstance(how, ReceiverFailed) and re.search(wrong, str(how))
                    assert (await served.post("/weights_checksums", {}))[1] == before
                    assert served.engine.version == 0
                else:
                    assert isinstance(how, Updated) and how.verify_s is not None and member.verified
            finally:
                group.close()
                await member.close(leave=True)
        status, answer = await served.post("/weights_checksums", {"of": "served"})
        assert (status, answer["weight_version"]) == (200, "1")
        assert await asyncio.to_thread(staging.differences, ChecksumReport.parse(answer)) == []
        assert (await served.post("/weights_checksums", {"of": "update"}))[0] == 400  # there is no update
