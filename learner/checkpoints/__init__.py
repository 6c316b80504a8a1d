"""Checkpoints on the disks of one or more nodes: directories, manifests, digests; and files of other programs."""
