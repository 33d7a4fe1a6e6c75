"""What the controller does: slots, agents, workers, generations. Nothing here decides."""
