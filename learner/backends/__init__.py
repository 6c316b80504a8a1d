"""Backends of the trainer: a model with its parallelism, its optimizer and its checkpoints."""
