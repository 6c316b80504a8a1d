"""A push of a new version from the learner to all engines."""
