"""Prompts, the buffered data source, and the choice of the groups that a step trains."""
