"""Which rank holds which part of which tensor, and the copies that turn one layout into another."""
