"""Child processes that run a reward of the user: they can be killed, and have no credential of the bus."""
