"""Runs whose processes are started by other programs: launchers, schedulers and clusters."""
