"""Restores from checkpoints that were saved with another number of ranks that share each layer."""
