"""When a rank's state is saved, to storage and to memory, and how a generation resumes from it."""
