"""The address of the bus in one line, and settings that would expose it to the network."""

import pytest

from tests.refusals import refusal
from tidemill.bus.client.addresses import Address, parse
from tidemill.bus.config import BusConfig
from tidemill.launch.run.access import address_line
from tidemill.launch.settings.config_loader import load


@pytest.mark.parametrize(
    "address",
    [
        Address(servers=("nats://127.0.0.1:4222",)),
        Address(servers=("nats://a:1", "nats://b:2", "nats://[::1]:3"), user="actor-0", password="p@s:s/w,o?rd#%"),
        Address(
            servers=("tls://bus.example:4222",),
            user="viewer",
            password="7%&=+ 7",
            ca="/etc/a b.pem",
            cert="/c.pem",
            key="/k.pem",
        ),
        Address(servers=("nats://a:1",), user="a-token"),
    ],
    ids=["bare", "cluster", "tls", "token"],
)
def test_an_address_survives_its_line_and_is_shown_without_its_password(address: Address) -> None:
    assert parse(address.line()) == address
    for shown in (str(address), repr(address)):
        assert not address.password or address.password not in shown
    assert "a-token" not in str(address)


def test_a_host_alone_is_enough() -> None:
    assert parse("bus:4222, other:4222").servers == ("nats://bus:4222", "nats://other:4222")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("http://secret@a:1", "want nats://host:port or tls://host:port"),
        ("nats://a:1,tls://b:2", "one scheme for all, got tls://"),
        ("nats://secret@", "got no host"),
        ("nats://u:secret@a:1?password=secret", "want ?ca, cert, key, got ?password"),
    ],
)
def test_a_malformed_address_is_refused_without_repeating_secrets(line: str, complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(line)
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_password_comes_from_the_environment_and_never_from_the_command_line() -> None:
    environment = {"TIDEMILL_BUS_USER": "actor-0", "TIDEMILL_BUS_PASSWORD": "secret"}
    assert parse(address_line("nats://a:1", None, "", environment)).password == "secret"
    assert load((), ["run=r"], environment).config.bus == BusConfig(), "what is secret is no setting"
    with refusal(ValueError, place="--bus") as refused:
        address_line("nats://actor-0:secret@a:1", None, "", {})
    assert "secret" not in str(refused.value)
    with refusal(ValueError, place="TIDEMILL_BUS_USER, TIDEMILL_BUS_PASSWORD"):
        address_line("nats://a:1", None, "", {"TIDEMILL_BUS_USER": "actor-0"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"host": "0.0.0.0"}, "host: 0.0.0.0 is open to other machines"),
        ({"host": "::"}, "is open to other machines"),
        ({"host": "gpu-7"}, "is open to other machines"),
        (
            {"server_name": "a", "cluster_listen": "0.0.0.0:6222", "cluster_routes": ("a:6222",)},
            "cluster_listen: 0.0.0.0:6222 is open",
        ),
        ({"url": "nats://u:p@a:1"}, "want no user and password"),
        ({"tls_cert": "a.pem"}, "tls_cert, tls_key: want both or none"),
        ({"cluster": 2}, "cluster: want 1 or 3"),
    ],
)
def test_a_bus_is_not_opened_to_other_machines_by_mistake(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BusConfig(**settings)  # type: ignore[arg-type]


def test_every_process_of_a_run_has_a_user() -> None:
    with refusal(ValueError, place="--set: bus.auth_users", got="4"):
        load((), ["run=r", "up.actors=5", "bus.auth=true", "bus.auth_users=4"])


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0", "auth": True},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "127.0.0.2"},
        {"host": "localhost"},
    ],
)
def test_a_bus_is_opened_to_other_machines_with_auth_or_insecure(settings: dict[str, object]) -> None:
    BusConfig(**settings)  # type: ignore[arg-type]
