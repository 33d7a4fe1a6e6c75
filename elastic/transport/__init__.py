"""Authenticated message channels between nodes; used by the snapshot server and the failure detector."""
