"""Off-policy learning: advantages, corrections, losses and diagnostics as pure functions of tensors."""
