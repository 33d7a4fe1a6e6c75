"""Communication between the members of a generation: torch.distributed only, no engine."""
