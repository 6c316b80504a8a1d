"""Prompts of files: rows, columns, tokens, their order and curriculum."""
