"""The seam where nodes come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


class ClusterError(Exception):
    """The cluster failed a request. The message is one sentence; time-outs name what was awaited."""


class ClusterEnded(ClusterError):
    """The cluster is gone, as a whole."""


class NodeState(str, Enum):
    """As the source knows it, at once; Ray's own node table follows later (a killed node: after about 14 s)."""

    STARTING = "starting"
    ALIVE = "alive"
    FROZEN = "frozen"
    LOST = "lost"


@dataclass(frozen=True)
class NodeInfo:
    """One node. `name` outlives a loss: a node brought back has the same name and a new `node_id`.

    `node_id` is Ray's, in hex ("" while starting). `pids` are all processes of the node that were alive when this was
    made (for a node just killed: those that were killed). `lives` counts how often the name was started.
    """

    name: str
    state: NodeState
    head: bool = False
    node_id: str = ""
    raylet_pid: int = 0
    pids: tuple[int, ...] = ()
    lives: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "state": self.state.value, "pids": list(self.pids)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeInfo:
        return cls(**{**data, "state": NodeState(data["state"]), "pids": tuple(data["pids"])})


class NodeSource(Protocol):
    """Not thread-safe. Call order:

    1. `address` once the source has been started (how it is started differs from source to source)
    2. `nodes`, `add_node`, `remove_node` in any order; all raise ClusterError
    3. `shutdown` last; it may be called twice

    A source does not promise that a node stays, nor that Ray's node table agrees with `nodes` at any moment.
    """

    @property
    def address(self) -> str:
        """For `ray.init(address=...)`."""
        ...

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Every node that was ever asked for under its name, lost ones included."""
        ...

    def add_node(self, name: str | None = None) -> NodeInfo:
        """Bring back the lost node `name`, or, without a name, the one lost longest, or else a new one.

        Returns when the node is registered with Ray.
        """
        ...

    def remove_node(self, name: str) -> NodeInfo:
        """Take the node away in good order: it leaves Ray's node table before this returns."""
        ...

    def shutdown(self) -> None: ...
