"""Accelerators: which devices a machine has, and which process gets which of them."""
