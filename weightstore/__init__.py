"""Versions of the weights: their registry, how they reach engines, and snapshots for those who come late."""
