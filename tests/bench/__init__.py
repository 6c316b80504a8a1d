"""Benchmarks for any machine: each compares with a reference in the same run and prints a ratio."""
