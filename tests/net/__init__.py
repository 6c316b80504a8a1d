"""Cells of failure on several machines, each a set of Linux namespaces on this one (``tests/net/lab.py``)."""
