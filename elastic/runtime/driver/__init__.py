"""Starting a run and talking to its controller, from a driver process."""
