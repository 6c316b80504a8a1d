"""The wire format: messages, their bytes, their invariants, and the names of streams and subjects."""
