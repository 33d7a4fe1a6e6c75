"""Applying, following and deleting the objects of a run."""
