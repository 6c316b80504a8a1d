"""Filters of groups and of the buffer."""
