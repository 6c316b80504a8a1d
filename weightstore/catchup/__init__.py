"""How an engine that missed pushes gets the current version."""
