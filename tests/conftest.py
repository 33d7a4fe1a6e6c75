"""Of all tests."""

from __future__ import annotations

from hypothesis import settings

# Busy cores make any deadline a coin toss; how long an example takes says nothing about it being right.
settings.register_profile("here", deadline=None, print_blob=True)
settings.load_profile("here")
