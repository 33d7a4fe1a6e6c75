"""Named byte strings in any fsspec storage: what checkpoints, journals and run folders are kept in."""
