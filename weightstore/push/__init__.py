"""A push of a new version from the learner to all engines, and its snapshots for engines that join late."""
