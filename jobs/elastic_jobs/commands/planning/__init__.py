"""Subcommands that predict: memory and time of a plan, compute-optimal sizes."""
