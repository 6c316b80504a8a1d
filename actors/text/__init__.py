"""Tokenizers, chat templates and tool calls."""
