"""Benchmarks that anyone can run: each compares with something in the same run and prints a ratio."""
