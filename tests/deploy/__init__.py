"""Deployments: processes started by schedulers, of other releases, and runs that share a bus."""
