"""Child processes that run code of users: they can be killed, and have no credential of the bus."""
