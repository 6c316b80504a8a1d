"""Tools for a learner with wrong numbers: fixed batches, dumps of steps, the report of the first, comparisons."""
