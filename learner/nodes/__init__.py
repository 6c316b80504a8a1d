"""Node agents: parents of the learner's ranks on several machines; over the bus they start and end them together."""
