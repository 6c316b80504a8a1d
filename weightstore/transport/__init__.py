"""How tensors get from the learner to an engine: NCCL or gloo, shared memory, HTTP."""
