"""Tests of what runs a run elsewhere: batch systems, clusters and other launchers."""
