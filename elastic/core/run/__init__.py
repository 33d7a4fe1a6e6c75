"""The state machine of a run: phases, generations, membership, recovery."""
