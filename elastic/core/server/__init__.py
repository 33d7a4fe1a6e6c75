"""The rules of a parameter server: which micro-batches make an update, and who holds which part of the state."""
