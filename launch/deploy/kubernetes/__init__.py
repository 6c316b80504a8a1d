"""Runs on Kubernetes: the Helm chart in ``chart``, its rendering for Kustomize in ``base``, and the schema of its values."""
