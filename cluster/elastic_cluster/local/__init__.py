"""A Ray cluster of many nodes on one machine; its keeper, its starter, its autoscaler."""
