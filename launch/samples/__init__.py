"""Commands that read samples: ``tidemill tail``, ``show``, ``stats``, ``replay`` and ``archive``. They do not affect
training.
"""
