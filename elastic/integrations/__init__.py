"""Trainers and models of other libraries over `elastic.initialize`. Each module needs its library."""
