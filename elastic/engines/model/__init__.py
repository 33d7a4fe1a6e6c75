"""What engines read of a model besides its tensors (names, a description, what its modules keep), and rates of updates."""
