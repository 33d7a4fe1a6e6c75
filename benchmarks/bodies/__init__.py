"""What the processes of the peers run: the same training, each with its own library's means."""
