"""Tables and policies without state of their own: scaling, capacity, quarantine, liveness, intervals."""
