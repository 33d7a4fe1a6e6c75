"""What recovery, resizing and saving cost, next to the same for the peers, in one run on one machine: `make bench`."""
