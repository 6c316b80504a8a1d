"""A run on a bus with users and three servers: no process is refused the access it needs, and no password leaves its file."""

from pathlib import Path

from bus.server.auth import credentials_file, read_credentials
from launch.cli.looking import find_run
from launch.run.access import viewer_line
from tests.whole.running import assert_books_balance, up


def test_a_run_on_a_cluster_with_users(tmp_path: Path) -> None:
    with up(tmp_path, "bus.auth=true", "bus.cluster=3", "bus.auth_users=1") as run:
        assert run.wait() == 0, run.log
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["steps"] == 6
    auth = run.directory / "auth"
    passwords = [read_credentials(credentials_file(auth, user))[1].encode() for user in ("learner", "actor-0", "engine-0", "viewer")]
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != auth]:
        data = path.read_bytes()
        assert not any(password in data for password in passwords), f"{path} holds a password"
        assert path.suffix != ".log" or b"may not publish here" not in data, path.read_text()


def test_reading_commands_use_the_viewers_login(tmp_path: Path) -> None:
    """No bus is running: only the address is made."""
    (tmp_path / "auth").mkdir()
    credentials_file(tmp_path / "auth", "viewer").write_text("TIDEMILL_BUS_USER=viewer\nTIDEMILL_BUS_PASSWORD=p\n")
    (tmp_path / "config.yaml").write_text("run: r\nbus: {url: '', auth: true, tls_ca: ca.pem}\n")
    (tmp_path / "bus.url").write_text("tls://a:1,tls://b:2")
    assert find_run(str(tmp_path), "", "") == ("tls://viewer:p@a:1,b:2?ca=ca.pem", "r")
    other = {"TIDEMILL_BUS_USER": "learner", "TIDEMILL_BUS_PASSWORD": "q"}
    assert viewer_line("nats://a:1", other, tmp_path, {"auth": True}) == "nats://learner:q@a:1"
