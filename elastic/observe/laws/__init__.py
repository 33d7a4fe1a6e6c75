"""What a run's journal says about its batch and its cost: laws of training, applied to what was measured."""
