"""Runs of which other programs start the processes: launchers, schedulers and clusters."""
