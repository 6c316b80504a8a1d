"""Clients of engines: discovery, choice, requests."""
