"""Layers of the policy that Megatron-core does not have in this form, and the kernels that they use."""
