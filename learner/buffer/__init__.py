"""The sample buffer: which tasks are issued, which groups form a step, and the accounting of every sample."""
