"""Node agents: parents of the learner's ranks on several machines, which meet over the bus and start, end and restart
them together.
"""
