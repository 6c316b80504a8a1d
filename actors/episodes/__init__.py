"""Episodes: samples of several model calls, made by programs in child processes."""
