"""The command line, the configuration of a run, and the wiring of its processes."""
