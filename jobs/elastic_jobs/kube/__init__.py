"""A job file as what `elastic_cluster.kube` renders and applies."""
