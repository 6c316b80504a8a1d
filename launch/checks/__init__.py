"""Checks of a run before it starts (`docs/configuring.md`)."""
