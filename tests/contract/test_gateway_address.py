"""Where an actor's gateway listens, and the address that programs are given; every request needs the key of an
episode.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.episode_kit import Client, stage, task
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.actor.process import reach_of_gateway
from tidemill.actors.config import GatewayConfig
from tidemill.actors.episodes.rollouts import open_rollouts
from tidemill.actors.errors import BadRow
from tidemill.actors.rollout_settings import RolloutPrograms
from tidemill.bus.client.addresses import HERE, Reach

BUS = "nats://127.0.0.1:4222"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("gateway") / "model", max_position_embeddings=1024)


async def test_programs_elsewhere_ask_at_the_advertised_address_with_their_key(model_dir: Path) -> None:
    """127.0.0.2 is another address of this machine: a gateway on 127.0.0.1 does not answer there."""
    seen: dict[str, Any] = {}

    async def program(client: Client) -> float:
        seen["url"] = client.base_url
        port = client.base_url.split(":")[2].split("/")[0]
        for name, headers in (
            ("none", {}),
            ("wrong", {"Authorization": "Bearer x"}),
            ("own", {"Authorization": f"Bearer {client.api_key}"}),
        ):
            async with client.session.get(f"http://127.0.0.2:{port}/v1/models", headers=headers) as response:
                seen[name] = response.status
        status, answer = await client.post("/generate", {"input_ids": [3, 4]})
        assert status == 200, answer
        return 1.0

    async with stage(model_dir, program, at=Reach("0.0.0.0", "127.0.0.2")) as scene:
        made = await scene.rollout.sample(task(), 0, "a")
    assert made.sample.reward == 1.0
    assert seen.pop("url").startswith("http://127.0.0.2:")
    assert seen == {"none": 401, "wrong": 401, "own": 200}


@pytest.mark.parametrize(
    ("config", "at"),
    [
        (GatewayConfig(), HERE),
        (GatewayConfig(host="127.0.0.2"), Reach("127.0.0.2", "127.0.0.2")),
        (GatewayConfig(host="auto"), Reach("127.0.0.1", "127.0.0.1")),
        (GatewayConfig(host="0.0.0.0"), Reach("0.0.0.0", "127.0.0.1")),
        (GatewayConfig(host="0.0.0.0", advertise="host.docker.internal"), Reach("0.0.0.0", "host.docker.internal")),
        (GatewayConfig(advertise="10.0.0.7:9000"), Reach("127.0.0.1", "10.0.0.7:9000")),
    ],
)
def test_where_it_listens_and_what_it_advertises(config: GatewayConfig, at: Reach) -> None:
    assert reach_of_gateway(config, BUS) == at


def test_an_address_without_a_route_is_refused() -> None:
    with refusal(BadRow, place="host"):
        reach_of_gateway(GatewayConfig(host="auto"), "nats://nowhere.invalid:4222")


async def test_an_address_of_another_machine_is_refused(model_dir: Path) -> None:
    async def none(client: Client) -> None:
        raise AssertionError("nothing is played")

    async with stage(model_dir, none) as scene:
        with refusal(BadRow, place="actor.gateway.host"):
            async with open_rollouts(
                RolloutPrograms(rollouts={}, model=str(model_dir)),
                scene.responses,
                reach=Reach("203.0.113.9", "203.0.113.9"),
            ):
                pass
