"""One node: its agent and the heartbeats of its workers."""
