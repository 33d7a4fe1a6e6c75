"""Runs on Kubernetes with KubeRay: manifests as plain data, and the client that applies, follows and deletes them.

Importing this package imports neither Ray nor the Kubernetes client.
"""
