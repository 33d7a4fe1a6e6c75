"""job.yaml: its keys, and every check that is made before anything starts."""
