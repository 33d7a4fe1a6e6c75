"""What recovery, resizing and saving cost, beside the same for the peers, in one run on one machine: `make bench`."""
