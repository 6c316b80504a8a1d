"""Rollouts that ship: programs that run in the children of an actor, as programs of users do."""
