"""Off-policy learning: advantages, corrections, losses, diagnostics as pure functions of tensors, and one way to choose
them.
"""
