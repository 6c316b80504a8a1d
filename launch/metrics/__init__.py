"""Metrics of a run for other programs: TensorBoard, Weights & Biases, files, and sinks of the user's own."""
