"""Versions, snapshots and deltas that are kept."""
