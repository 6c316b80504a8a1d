"""A run inside an existing Ray cluster: one Ray actor for each process, and the driver that supervises them."""
