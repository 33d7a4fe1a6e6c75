"""Everything that is checked of a job and its manifests before they leave."""
