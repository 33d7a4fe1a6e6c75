"""What runs in a worker around the user's function."""
