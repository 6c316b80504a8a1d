"""Rewards over HTTP: the client of a reward server, and a language model as a judge."""
