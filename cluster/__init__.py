"""Where nodes come from: a local many-node Ray cluster on one machine, and faults for it.

Importing this package does not import Ray.
"""

from cluster.autoscaled import AutoscaledCluster
from cluster.local import LocalCluster
from cluster.source import ClusterEnded, ClusterError, NodeInfo, NodeSource, NodeState

__all__ = ["AutoscaledCluster", "ClusterEnded", "ClusterError", "LocalCluster", "NodeInfo", "NodeSource", "NodeState"]
