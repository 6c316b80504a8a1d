"""A run: its processes, supervision, accounting and summary."""
