"""Child processes, event loops and files: nothing of NATS."""
