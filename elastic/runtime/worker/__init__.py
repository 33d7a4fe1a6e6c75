"""One worker process: its actor, its messages to the controller, its side of a generation."""
