"""The settings of a run in its row, between processes of two releases."""

from pathlib import Path

import pytest

from tidemill.launch.settings.config_loader import SettingsError, from_map, load, setting_paths, to_map
from tidemill.launch.settings.run_row import NEWER, from_row, to_row

RELEASED = Path(__file__).parents[1] / "data/settings_of_last_release.txt"
"""Every section and setting of the last release, one a line."""


def test_settings_that_the_last_release_does_not_know_stand_in_the_list_of_newer_ones() -> None:
    released = set(RELEASED.read_text().split())
    added = {path for path in setting_paths() - released if path.rpartition(".")[0] in {"", *released}}
    assert added == set(NEWER), "a new setting belongs into NEWER (launch/settings/run_row.py)"


def test_a_row_has_every_setting_but_newer_ones_at_their_default() -> None:
    config = load([], ["bus.trained_max_bytes=1000000", "learner.record.trained=0.5"]).config
    row = to_row(config)
    assert row["bus"]["trained_max_bytes"] == 1000000
    assert row["learner"]["record"]["trained"] == 0.5
    assert "fsdp_replicas" not in row["learner"]
    assert row["learner"]["steps"] == to_map(config)["learner"]["steps"]
    assert from_map(row, "row") == config
    assert from_map(to_row(load([]).config), "row") == load([]).config


def test_an_unknown_setting_of_the_learner_is_left_out_and_any_other_is_refused_by_its_name() -> None:
    row = to_row(load([], ["engine.max_running=7"]).config)
    row["learner"] |= {"from_the_future": 1}
    row["learner"]["algorithm"] |= {"loss_of_tomorrow": {"x": 1}}
    assert from_row(row, "digits").engine.max_running == 7
    row["engine"] |= {"from_the_future": 1}
    refused = "run digits, row run/config: engine.from_the_future: no such setting in this release; cure: start"
    with pytest.raises(SettingsError, match=refused):
        from_row(row, "digits")
