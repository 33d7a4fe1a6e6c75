"""What the actors of a run send each other: plain data that no actor's module has to be imported for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.manifest_json import from_json
from elastic.core.data.joined_reports import JoinedReports

# How long an agent waits for the answer to a beat. A restarted controller may be unknown to it for that long.
BEAT_LIMIT_S = 2.0

# How long a worker waits for its agent's answer to a `Post`. Within it a probe is answered, and a start has longer.
POST_LIMIT_S = 3.0

# A worker by its number; or the agent of a node, by the node.
Receiver = int | str


@dataclass(frozen=True)
class NodeFacts:
    """A node, described by its agent. Other nodes reach its snapshot server at `memory`, its own workers at
    `memory_name`. Workers send heartbeats to `mailbox`. `launcher` is the command that starts a worker in place of
    Python; empty for Python itself. `machine` is the same for all nodes on one running kernel. `parameters`: where its
    parameter server listens, if it has one. `lasting`: see `core.events.WorkerReady`."""

    mailbox: str
    memory: tuple[str, int]
    memory_name: str
    domain: str = ""
    launcher: str = ""
    machine: str = ""
    parameters: tuple[str, int] | None = None
    lasting: int = 0


@dataclass(frozen=True)
class Beat:
    """One node's heartbeat. `ages` are the seconds for which each worker has been silent; `gone` are ended processes.

    The agent vouches for a process that exists and is not stopped: its age is 0 until it has been silent for long.
    """

    node: str
    ages: dict[int, float]
    gone: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """One message of a worker. `kind` is "event", "step", "restored", "shard", "moved", "save_left_out", "cadence",
    "replica_moved", "function_left", "passes", "recorded", "memory" or "rehearsed"; `number` counts the worker's
    messages from 1."""

    kind: str
    data: Any
    urgent: bool = True
    replay: bool = False
    number: int = 0


@dataclass(frozen=True)
class Reply:
    """The controller's answer to a batch of items.

    `fenced`: the worker is no longer part of the run and must end. `durable`: the worker's events up to this number are
    in the journal. `taken` is False when the worker did not know this controller yet; it then sends everything again.
    """

    incarnation: int
    fenced: bool = False
    durable: int = 0
    taken: bool = True


class Post(NamedTuple):
    """A worker's messages that its agent passes on, in order: the worker knows the controller of incarnation `heard`,
    and waits for its agent for `limit_s`."""

    heard: int
    items: Sequence[Item]
    limit_s: float = POST_LIMIT_S


class QuietNodes(NamedTuple):
    """Heartbeats of several nodes, passed on by an agent: `workers[i]` are those of `nodes[i]`, none of them silent.
    What is not quiet its own agent tells the controller in a `Beat`."""

    nodes: tuple[str, ...]
    workers: tuple[tuple[int, ...], ...]


class BeatReply(NamedTuple):
    """The controller's answer to a `Beat`. `wanted`: the node is part of the run. `relay`: the actor handle of the
    agent that passes on quiet beats and step reports of this node; None: none does."""

    wanted: bool
    relay: Any = None


class Command(NamedTuple):
    """A command of the controller of `incarnation` for several workers, or a question to several agents. `shared` are
    the arguments that all of them get; the receiver's own follow them. `patience_s`: see `node.downlink`."""

    incarnation: int
    name: str
    shared: tuple[Any, ...]
    patience_s: float


class Part(NamedTuple):
    """What of a command is for one node: the arguments of each worker, or under the node itself those of its agent.
    `agent` is the actor handle of the agent; None where this one gets it, or the handle has been given before."""

    agent: Any
    own: Mapping[Receiver, tuple[Any, ...]]


class Handed(NamedTuple):
    """What became of a command, by worker (of a question: by node): the answer, why a controller is not obeyed, how the
    process ended. A receiver that is in none of them has not acknowledged it."""

    answers: dict[Receiver, Any]
    refused: dict[Receiver, str]
    died: dict[int, str]

    def add(self, other: Handed) -> None:
        self.answers.update(other.answers)
        self.refused.update(other.refused)
        self.died.update(other.died)

    @property
    def receivers(self) -> set[Receiver]:
        """Of whom it tells."""
        return {*self.answers, *self.refused, *self.died}


class NodeReports(NamedTuple):
    """Step reports of several workers, joined by the agents of their `nodes`: `workers` have sent them to the
    controller of incarnation `heard`."""

    nodes: tuple[str, ...]
    workers: tuple[int, ...]
    heard: int
    steps: tuple[JoinedReports, ...]


@dataclass(frozen=True)
class NodeReply:
    """The controller's answer to NodeReports that it has taken: `durable[i]` is as in `Reply`, for `workers[i]`."""

    incarnation: int
    durable: tuple[int, ...]


@dataclass(frozen=True)
class Assembled:
    """A snapshot ready to be restored: `copies[rank]` are the addresses of the nodes that have that rank's shard.

    Each worker receives one. `text` is the manifest's JSON, serialised once: half a million chunks (1,000 ranks,
    stage 3) would take a second to pickle for each worker.
    """

    id: str
    text: str
    copies: tuple[tuple[tuple[str, int], ...], ...]

    def manifest(self) -> Manifest:
        """Parses `text`; takes as long as reading a manifest from storage."""
        return replace(from_json(self.text), id=self.id)
