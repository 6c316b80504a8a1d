"""Hugging Face models as Megatron-core models: one module per family, and the parts that they share."""
