"""The cases: a module each, with one function that measures and returns figures."""
