"""Memory and step time of a training job, predicted before it starts: which mesh and strategy fit and are fastest."""
