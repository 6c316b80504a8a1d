"""Transport of tensors from the learner to an engine: NCCL or gloo, shared memory, HTTP."""
