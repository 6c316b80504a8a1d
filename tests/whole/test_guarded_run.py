"""One run on a bus with users and three servers, with pushes by handles, at lag 0.

No process is refused the access it needs, and no password leaves its file; every version is read out of the learner's
memory; no token is older than its weights.
"""

import re
from pathlib import Path

import pytest

from tests.whole.running import Up, assert_books_balance, up
from tidemill.bus.server.auth import credentials_file, read_credentials
from tidemill.launch.cli.find_run import find_run
from tidemill.launch.run.access import viewer_line

BUS = ("bus.auth=true", "bus.cluster=3", "bus.auth_users=2")
PUSHES = ("weights.transport=handles", "weights.verify=always", "up.engines=2", "weights.min_engines=2")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Up:
    """Return a run that has ended."""
    with up(tmp_path_factory.mktemp("guarded"), *BUS, *PUSHES, "staleness.max_lag=0") as run:
        assert run.wait() == 0, run.log[-4000:]
    return run


def test_a_run_on_a_cluster_with_users(ended: Up) -> None:
    assert_books_balance(ended.summary, max_lag=0)
    assert ended.summary["steps"] == 6
    auth = ended.directory / "auth"
    passwords = [
        read_credentials(credentials_file(auth, user))[1].encode()
        for user in ("learner", "actor-0", "engine-0", "viewer")
    ]
    for path in [path for path in ended.directory.parent.rglob("*") if path.is_file() and path.parent != auth]:
        data = path.read_bytes()
        assert not any(password in data for password in passwords), f"{path} holds a password"
        assert path.suffix != ".log" or b"may not publish here" not in data, path.read_text()


def test_a_run_pushes_by_handles(ended: Up) -> None:
    assert ended.summary["pushes"] >= 5
    logs = {log.name: log.read_text() for log in (ended.directory / "logs").glob("*.log")}
    pushed = [line for log in logs.values() for line in re.findall(r"pushed version=.*", log)]
    assert len(pushed) >= 5, pushed
    for line in pushed[2:]:  # before that an engine may still be loading version 0
        assert " engines=2 adapters=0 verified=2 evicted=0 " in line, pushed
    engines = [log for name, log in logs.items() if name.startswith("engine-")]
    assert len(engines) == 2 and all("the learner joined, by handles" in log for log in engines)
    assert not any("no handles for this engine" in log for log in logs.values())


def test_at_lag_0_all_is_on_policy_and_both_sides_agree(ended: Up) -> None:
    """Synchronous training is the same mechanism with another number: no token is older than its weights."""
    assert_books_balance(ended.summary, max_lag=0)
    for line in ended.metrics:
        assert line["offpolicy/lag_max"] == 0, line
        assert line["offpolicy/logprob_diff_abs"] < 1e-4, line
        assert line["offpolicy/tis_clipped_high"] == 0, line


def test_reading_commands_use_the_viewers_login(tmp_path: Path) -> None:
    """No bus is running: only the address is made."""
    (tmp_path / "auth").mkdir()
    credentials_file(tmp_path / "auth", "viewer").write_text("TIDEMILL_BUS_USER=viewer\nTIDEMILL_BUS_PASSWORD=p\n")
    (tmp_path / "config.yaml").write_text("run: r\nbus: {url: '', auth: true, tls_ca: ca.pem}\n")
    (tmp_path / "bus.url").write_text("tls://a:1,tls://b:2")
    assert find_run(str(tmp_path), "", "") == ("tls://viewer:p@a:1,b:2?ca=ca.pem", "r")
    other = {"TIDEMILL_BUS_USER": "learner", "TIDEMILL_BUS_PASSWORD": "q"}
    assert viewer_line("nats://a:1", other, tmp_path, {"auth": True}) == "nats://learner:q@a:1"
