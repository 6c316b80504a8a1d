"""Samples read, searched and written as text, for ``tidemill tail``, ``show``, ``replay`` and ``archive``."""
