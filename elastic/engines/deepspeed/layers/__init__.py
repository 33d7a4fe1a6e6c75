"""Layers that DeepSpeed puts into the places of a model's own, whose weights or experts ranks share."""
