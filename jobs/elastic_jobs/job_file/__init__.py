"""job.yaml: what may stand in it, and every check that is made before anything starts."""
