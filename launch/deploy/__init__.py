"""Running on the clusters of others: Slurm, Kubernetes, Ray, systemd, images. Files of these are beside the code."""
