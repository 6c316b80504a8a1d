"""Runs under the launchers of others: their files validated by their own programs, and their commands executed."""
