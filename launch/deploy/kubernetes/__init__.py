"""Runs on Kubernetes: the Helm chart in ``chart``, its rendering in ``base``, the schema of its values."""
