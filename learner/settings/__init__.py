"""Settings of the learner, and their checks that need no model. Loads no torch."""
