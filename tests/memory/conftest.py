"""The memory tier with its real sockets, segments and processes; no Ray and no training."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("memory", deadline=None, print_blob=True)
settings.load_profile("memory")
