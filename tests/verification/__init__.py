"""Mutation tests: real bugs of resharders, each refused before the first step. `python -m verification`."""
