"""Any model of transformers for causal language modelling, sharded by torch's fully_shard."""
