"""Reward functions, one per file, selected by name or import path."""
