"""The user's own part of a run's state: `elastic.state`, and the objects that are registered with it."""
