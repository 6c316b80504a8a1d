"""Texts of a model directory: the chat template, and the tokens that end a response."""
