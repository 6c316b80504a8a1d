"""Checkpoints on the disks of one or more nodes: directories, manifests, digests. No torch."""
