"""Training state at rest: shards, digests, the storage tier and the memory tier."""
