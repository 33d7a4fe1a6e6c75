"""The command line and the Jobs API: everything between a user and a run."""
