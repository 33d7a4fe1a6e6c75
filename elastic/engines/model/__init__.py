"""What engines read of a model besides its tensors: names, a description, kept objects; and the rates of updates."""
