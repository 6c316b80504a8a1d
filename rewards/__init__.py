"""Rewards: one a file, chosen by name or import path."""
