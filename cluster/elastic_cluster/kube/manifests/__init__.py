"""A job as Kubernetes manifests: plain data, made without asking any cluster."""
