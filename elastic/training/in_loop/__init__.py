"""Generations change while the user's function stays in its loop."""
