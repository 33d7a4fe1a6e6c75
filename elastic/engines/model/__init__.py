"""What engines read of a model besides its tensors: names, a description, and what its modules keep."""
