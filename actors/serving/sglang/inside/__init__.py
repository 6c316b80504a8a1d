"""Modules that run in the processes of an SGLang server."""
