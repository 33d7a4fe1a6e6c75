"""Where nodes come from: a local many-node Ray cluster on one machine, and faults for it.

Importing this package does not import Ray.
"""

from elastic_cluster.local.autoscaled import AutoscaledCluster
from elastic_cluster.local.cluster import LocalCluster
from elastic_cluster.source import ClusterEnded, ClusterError, NodeInfo, NodeSource, NodeState

__all__ = ["AutoscaledCluster", "ClusterEnded", "ClusterError", "LocalCluster", "NodeInfo", "NodeSource", "NodeState"]
