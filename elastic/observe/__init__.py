"""The journal of a run and what is read from it."""
