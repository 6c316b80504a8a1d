"""The actor: leases tasks, generates, scores and publishes samples."""
