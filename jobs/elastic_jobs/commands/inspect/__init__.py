"""Subcommands that read: a run's history, curves, output, checkpoints and state. They change nothing."""
