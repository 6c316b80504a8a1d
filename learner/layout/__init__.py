"""The layout of a model on the ranks: process groups, pipeline stages, and the sizes of what each rank holds."""
