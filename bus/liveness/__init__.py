"""Records that processes publish about themselves: live rows, epochs and keys."""
