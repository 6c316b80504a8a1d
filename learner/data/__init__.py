"""Prompts, the buffered data source, and the choice of what a step trains."""
