"""Catch-up of an engine that missed pushes: the sources of the current version."""
