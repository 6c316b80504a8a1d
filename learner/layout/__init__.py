"""The layout of a model on the ranks: process groups, pipeline stages, and the sizes that each layout can divide."""
