"""A simulated world that drives the rules of a run through failures, seeded and exactly repeatable."""
