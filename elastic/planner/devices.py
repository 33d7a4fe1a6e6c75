"""Accelerators that the planner knows, and the constants that were fitted on measured runs.

Sources. Peak FLOP/s (dense bf16), memory and NVLink (one direction): NVIDIA's data sheets of A100, H100, H200 and DGX
B200. Node network: the adapters of DGX A100 (8 x 200 Gb/s) and DGX H100, H200, B200 (8 x 400 Gb/s). `matmul_flops` is
the best rate that the MAMF search found for bf16 matrices (Bekman, Machine Learning Engineering, "Maximum Achievable
Matmul FLOPS"): no shape reaches the peak. `attention_flops`: FlashAttention-2, forward and backward (arXiv 2307.08691,
section 4.1, A100 and H100; carried over in proportion to H200 and B200).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.core.errors import UsageError


@dataclass(frozen=True)
class Device:
    """Rates in units per second, for one device; `node_bytes_per_s` for the network of a whole node."""

    name: str
    peak_flops: float
    matmul_flops: float
    attention_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    node_bytes_per_s: float
    host_link_bytes_per_s: float


DEVICES = {
    device.name: device
    for device in (
        Device("A100-40GB", 312e12, 271.2e12, 200e12, 40_536 * 2**20, 1.555e12, 300e9, 200e9, 25e9),
        Device("A100", 312e12, 271.2e12, 200e12, 81_251 * 2**20, 2.039e12, 300e9, 200e9, 25e9),
        Device("H100", 989e12, 794.5e12, 335e12, 81_116 * 2**20, 3.35e12, 450e9, 400e9, 50e9),
        Device("H200", 989e12, 794.5e12, 335e12, 143_771 * 2**20, 4.8e12, 450e9, 400e9, 50e9),
        Device("B200", 2250e12, 1745e12, 736e12, 180_000 * 10**6, 8e12, 900e9, 400e9, 50e9),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes of `per_node` devices. `node_bytes_per_s` 0 takes the device's usual network.

    `host_memory_bytes` is a node's; 0: unknown, and offload is not limited by it.
    """

    device: Device
    nodes: int
    per_node: int = 8
    node_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise UsageError(f"a cluster has at least one node of one device, not {self.nodes} x {self.per_node}")
        if self.node_bytes_per_s < 0 or self.host_memory_bytes < 0:
            raise UsageError("the network and the host memory of a node cannot be below zero")

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def network_bytes_per_s(self) -> float:
        return self.node_bytes_per_s or self.device.node_bytes_per_s


def parse_cluster(text: str) -> Cluster:
    """`8x8xH100`: nodes x devices per node x device; `4xA100` is four nodes of eight. Raises UsageError."""
    match = re.fullmatch(r"(\d+)x(?:(\d+)x)?([A-Za-z][\w-]*)", text.strip())
    if match is None:
        raise UsageError(f"nodes are written NODESxDEVICESxKIND, for example 8x8xH100, not {text!r}")
    nodes, per_node, name = match.groups()
    device = next((device for known, device in DEVICES.items() if known.lower() == name.lower()), None)
    if device is None:
        raise UsageError(f"no device is called {name!r}; known devices: {', '.join(DEVICES)}")
    return Cluster(device, int(nodes), int(per_node or 8))
