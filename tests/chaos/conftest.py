"""The files of the smoke run are made before the first test, as those of the whole runs."""

from tests.whole.conftest import smoke_files

__all__ = ["smoke_files"]
