"""Layers that neighbouring ranks share out (`mesh: {pp: N}`), by the schedules of torch.distributed.pipelining."""
