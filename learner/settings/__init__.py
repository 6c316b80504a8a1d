"""Settings of the learner, and what follows from them without a model. Loads no torch."""
