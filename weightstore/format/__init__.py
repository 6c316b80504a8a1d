"""Manifest and checksums of a set of weights."""
