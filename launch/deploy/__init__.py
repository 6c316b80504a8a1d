"""Tidemill under the launchers and schedulers of others."""
