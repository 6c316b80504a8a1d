"""The batch of a step: arrays of its samples for every rank."""
