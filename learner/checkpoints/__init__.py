"""Checkpoints on the disks of one or more nodes: directories, manifests, digests; torch in ``staged_files`` alone."""
