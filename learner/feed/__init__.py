"""The feeder process, and the connection over which ranks get their batches."""
