"""Environments of other projects, as they ship them: `make test-env`."""
