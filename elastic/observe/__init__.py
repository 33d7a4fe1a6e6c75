"""The journal of a run, its readers (summary, story, report, trace), and sinks that get its records live."""
