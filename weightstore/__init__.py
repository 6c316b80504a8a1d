"""Versions of the weights: their registry, pushes to the engines, and snapshots for engines that join late."""
