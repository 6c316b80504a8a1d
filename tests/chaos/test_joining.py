"""An engine that joins while a run generates and pushes."""

from pathlib import Path

from tests.chaos.joining import join


def test_an_engine_that_joins_serves_the_newest_version_first_and_nobody_waits_for_it(tmp_path: Path) -> None:
    join(tmp_path)
