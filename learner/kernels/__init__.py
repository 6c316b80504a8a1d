"""Computations of packed rows that every backend uses: attention, log-probs, and the kernels beneath. Torch alone."""
