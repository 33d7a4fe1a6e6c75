"""A node's snapshot server: segments, shards, replicas and parity."""
