"""Rewards that run a response's program: a sandbox of the kernel's means, and the tests of a label."""
