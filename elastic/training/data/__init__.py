"""What a rank reads: its dealt micro-batches, and where the run stands in the data."""
