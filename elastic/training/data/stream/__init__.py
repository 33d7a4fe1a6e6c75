"""Data that streams: what each reader of a run reads, and the state from which it resumes."""
