"""The registry of versions, and the snapshots that are kept."""
