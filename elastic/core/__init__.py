"""The pure part: what is decided, from data alone. No Ray, torch, storage or clock."""
