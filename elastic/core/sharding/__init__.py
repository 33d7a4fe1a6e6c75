"""Which rank holds which part of which tensor, and the reads that turn one layout into another."""
