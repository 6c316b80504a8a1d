"""Training: from the sample stream to the next version of the weights."""
