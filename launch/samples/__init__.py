"""Commands that read samples: ``tidemill tail``, ``show``, ``replay`` and ``archive``. They do not affect training."""
