"""The state of a live engine, whichever it is: copied out, read, installed at another world size, verified."""
