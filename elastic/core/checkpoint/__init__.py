"""Manifests: what makes shards one checkpoint or snapshot, and where replicas and parity go."""
