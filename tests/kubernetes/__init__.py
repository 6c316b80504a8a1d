"""The Helm chart and the Kustomize base: checked by the real programs, and their containers run as processes."""
