"""nats-server as a child process, alone or as a cluster, with its users."""
