"""The run on Ray: its controller, node agents, workers and drivers."""
