"""Tools for a learner with wrong numbers: fixed batches, dumps of each step, the report of the first steps, and
comparisons.
"""
