"""What an onlooker does with samples: ``tidemill tail``, ``show``, ``stats`` and ``replay``. They read, and disturb nobody."""
