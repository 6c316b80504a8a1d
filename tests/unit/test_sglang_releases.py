"""The supported releases of SGLang, and the message with which others are refused."""

import pytest

from tests.refusals import refusal
from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.sglang.arguments import CPU_CHECKSUMS, release_of


@pytest.mark.parametrize(
    ("said", "version", "cpu_checksums"),
    [
        ("0.5.21", (0, 5, 21), False),
        ("v0.5.22", (0, 5, 22), False),
        ("0.5.23", (0, 5, 23), True),
        ("0.5.23.post1", (0, 5, 23), True),
        ("0.6.0rc1", (0, 6, 0), True),
    ],
)
def test_a_supported_release(said: str, version: tuple[int, int, int], cpu_checksums: bool) -> None:
    release = release_of("e", said)
    assert (release, release >= CPU_CHECKSUMS) == (version, cpu_checksums)


@pytest.mark.parametrize("said", ["0.5.20", "v0.5.19", "0.5.15.post1", "0.4.9.post2"])
def test_an_older_release_is_refused_with_a_cure(said: str) -> None:
    wanted = (
        rf"^engine http://e: failed: SGLang's release: want >= 0\.5\.21, got {said}; install a newer one for "
        r"engine\.sglang\.python"
    )
    with pytest.raises(EngineFailed, match=wanted):
        release_of("http://e", said)


@pytest.mark.parametrize("said", ["", None, "main", "0.5"])
def test_no_release_at_all_is_refused(said: object) -> None:
    with refusal(EngineFailed, place="version in /server_info"):
        release_of("e", said)
