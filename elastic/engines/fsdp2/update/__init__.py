"""The update of a sharded model: an optimizer's step on shards, or on whole tensors."""
