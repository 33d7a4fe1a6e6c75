"""The manifest of a checkpoint: the one file that makes a set of shards a checkpoint.

Plain data with exact JSON forms. A checkpoint exists when its manifest exists; the manifest is written last, by the
controller alone, after every rank of one generation has reported its shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.core.sharding.layout import Chunk, RankLayout

FORMAT = 1
# Of a checkpoint whose ranks held slices of the layers: a reader of format 1 would take each for the whole.
FORMAT_OF_LANES = 2

# One value of JSON. mypy cannot express the recursion usefully here.
Json = Any


@dataclass(frozen=True)
class StoredTensor:
    """Where one flat buffer of one kind lies in its shard file.

    `key` is "<kind>/<buffer>", for example "exp_avg/group0". `dtype` is the safetensors name ("F32", "BF16", "I64",
    ...). `begin` is the absolute byte offset in the file of the tensor's first element.
    """

    key: str
    dtype: str
    numel: int
    begin: int


@dataclass(frozen=True)
class ShardRecord:
    """What one rank wrote, and the rank's report to the controller that it did.

    `digests` holds the rank's *partial* content check of each "<kind>/<parameter>"; the sum over all ranks modulo 2**64
    does not depend on how the parameter was cut. `chunks` map parameters to buffers (see `core.layout`).
    `extra_state` is what is equal on all ranks (counters, hyper-parameters, scheduler...); only rank 0 sends it, and
    `parameters` (name to shape) with it. Every rank adds the states of its own readers of a stream, "readers".
    `file` is a plain name inside the checkpoint's folder.

    With `tp` above 1 the rank is of lane `rank % tp` (see `core.mesh`): names are those of the model, shapes and
    elements those of the lane's slices, and the first rank of each lane sends `parameters`.
    """

    rank: int
    world_size: int
    generation: int
    step: int
    file: str
    bytes: int
    xxh3: str
    tensors: tuple[StoredTensor, ...]
    chunks: tuple[Chunk, ...]
    digests: Mapping[str, int]
    extra_state: Mapping[str, Json] | None = None
    zero_stage: int = 0
    parameters: Mapping[str, tuple[int, ...]] | None = None
    tp: int = 1

    @property
    def layout(self) -> RankLayout:
        """What this shard holds, as a source for a plan."""
        return RankLayout(self.chunks, {tensor.key.split("/", 1)[1]: tensor.numel for tensor in self.tensors})


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint. `digests` are whole-tensor content checks, keyed "<kind>/<parameter>".

    `parameters` maps each name to its shape, in the model's own order, or of a pipeline rank after rank; this is what a
    resume is compared with. `extra_state` carries what is not a flat tensor: optimizer scalars and hyper-parameters,
    scheduler, loss scaler, counters, the data cursor, the user's state, and the states of a stream's readers from all
    ranks. In `shards`, by rank, what is said here is left out: partial digests, extra state and shapes.

    With `tp` above 1 the names of `parameters` and `digests` say the lane too (`core.checkpoint.lanes`).
    """

    id: str
    run_id: str
    generation: int
    step: int
    world_size: int
    zero_stage: int
    parameters: Mapping[str, tuple[int, ...]]
    shards: tuple[ShardRecord, ...]
    digests: Mapping[str, int]
    extra_state: Mapping[str, Json] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    written_at: float = 0.0
    tp: int = 1
