"""Processes started by launchers and schedulers, and what they need of a run: its end and its accounting."""
