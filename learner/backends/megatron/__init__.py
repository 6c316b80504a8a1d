"""Models of Megatron-core, divided over the ranks by tensors, layers, sequences and experts."""
