"""What `elastic.training` asks of a training engine.

`EngineKind` is one kind of engine in this process, before and between its engines; `Engine` is one engine of one
generation. docs/extending.md says how to add a kind; tests/processes/engine_contract.py is what it is held to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from elastic.comm.hooks import GroupHooks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from elastic.comm.collective_ledger import CollectiveLedger
    from elastic.comm.strategies.bounded_staleness import Updates
    from elastic.core.checkpoint.manifest import Json
    from elastic.core.data.collectives import CollectiveUse
    from elastic.core.generation_spec import GenerationSpec
    from elastic.core.settings import RunSettings
    from elastic.engines.live_state import Fragment, ShardedState
    from elastic.engines.model.precision import Precision

# AnomalySettings.policy.
Nonfinite = Literal["stop", "skip", "rollback"]
Config = Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration at one world size. `global_batch` and `micro_batch` count samples; `micro_steps` is how many
    micro-batches every rank runs in a full step. `native` is what the engine is built with; `said`: what of an option
    holds at this world size, in words. `begins`: the run does so here, with the model's values of rank 0; else a
    restore follows, which sets all of them. `tp_sizes`: by how many ranks each layer may be shared in other
    generations; empty: by as many as here. `ep_sizes`: the same of experts. `sp` ranks share each sequence."""

    native: Mapping[str, Any]
    global_batch: int
    micro_batch: int
    micro_steps: int
    begins: bool = True
    ep_sizes: tuple[int, ...] = ()
    # Where the batch follows the number of workers: that of the most, and else of all.
    full_batch: int | None = None
    said: str = ""
    tp_sizes: tuple[int, ...] = ()
    # Whether the model can be cut by a size is found where a generation has it.
    any_tp: bool = False
    sp: int = 1

    @property
    def required_tp(self) -> tuple[int, ...]:
        """The sizes that the model must allow, besides the present one."""
        return () if self.any_tp else self.tp_sizes

    @property
    def shares_change(self) -> bool:
        """Has a rank as many experts as now in this generation only? Those that share layers divide them, too."""
        return max(len(self.ep_sizes), len(self.tp_sizes)) > 1


@dataclass(frozen=True)
class UserObjects:
    """What the user gave to `elastic.initialize` for the engine: DeepSpeed's arguments of these names, how ranks share
    each layer (`tp_plan`), and the layers (`pipeline`)."""

    model: Any
    optimizer: Any = None
    lr_scheduler: Any = None
    model_parameters: Sequence[Any] | None = None
    tp_plan: Any = None
    pipeline: Any = None


@dataclass(frozen=True)
class LossScale:
    """What an fp16 engine multiplies the loss by. `at_floor`: an overflow cannot lower it any further."""

    value: float
    at_floor: bool


@dataclass(frozen=True)
class StepOutcome:
    """One optimizer step. All but `collective_s` and `collectives` is the same on every rank.

    `applied` is False where the engine skipped the update. `grad_norm` is the L2 norm of the gradient over all ranks
    before clipping, a number or a 0-d tensor that the device may still be computing; None where the engine does not
    compute it; a value that is non-finite or negative stands for a non-finite gradient. `learning_rates` are those of
    the parameter groups after the step. `loss_scale` is None without a loss scaler. `collective_s` are the seconds
    that the training thread spent in collectives since the step's first forward pass; None where that is not measured,
    and on a device, where the ledger knows it after a synchronisation (`CollectiveLedger.passed_s`).
    `collectives` are those of this rank that were completed since the last outcome, folded.
    """

    applied: bool
    grad_norm: float | torch.Tensor | None
    learning_rates: tuple[float, ...]
    loss_scale: LossScale | None = None
    collective_s: float | None = None
    collectives: tuple[CollectiveUse, ...] = ()


class Witness(Protocol):
    """What verification reads of a live engine, by another way than that of snapshots and restores."""

    def fragments(self, names: Collection[str] | None = None) -> Iterable[Fragment]:
        """This rank's live tensors of these names, or all, one for each kind and name. Looked up parameter
        by parameter, not as those of `state()`."""
        ...

    def wrong_numbers(self, saved: Mapping[str, Json], names: Collection[str] | None = None) -> list[str]:
        """What differs between `saved`, which rank 0 is about to save ("optimizer" and all of `extra_state`), and the
        objects that own it, read by another way; scalars of the optimizer for the parameters in `names`, or all."""
        ...

    def expected_extra_state(self, saved: Mapping[str, Json]) -> dict[str, Json]:
        """What `extra_state` must give after `saved` was restored at this world size, on which counters may depend.
        Pure: a restore is verified against it."""
        ...


class Detachable(Protocol):
    """Ends in place: the next generation builds an engine on the same model and optimizer."""

    def obstacle(self) -> str | None:
        """Why no other engine can be built on this model and optimizer after `detach`, in one sentence; None where one
        can."""
        ...

    def detach(self) -> None:
        """`close`, and give model and optimizer back as they were before `build`, but for the parameters' values: the
        objects are the same, and whatever the user has added to them since stays."""
        ...


class GradientSums(Protocol):
    """One rank's sums of the gradients of a step's micro-batches, where they lie whole on that rank until the last
    micro-batch's backward reduces them. Another engine of the same kind and configuration, at another world size, can
    continue from them. Nothing here is collective.

    1. `before_reduction` once, before the first step
    2. `add` before the first backward of a step 3. `take` between two backward passes, or after one that has failed
    """

    def before_reduction(self, call: Callable[[], None]) -> None:
        """`call` in the backward of every step's last micro-batch, when its gradients are added and nothing is reduced
        yet. What it raises, that backward raises."""
        ...

    def reduce_by(self, reduce: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        """From the next step on `reduce`, in place of the engine, turns the sums of all trained parameters, by name, to
        their means over the ranks, in place; where `before_reduction` calls, after that. Raises UsageError."""
        ...

    def after_update(self, call: Callable[[], None]) -> None:
        """`call` at the end of every step, when the optimizer has made it, or skipped it."""
        ...

    def updates_by(self, update: Callable[[Callable[[], object]], None], clips: bool = True) -> Updates:
        """In every step that the engine makes, `update` is called in place of its optimizer's own update, which it is
        given. Not `clips`: with the gradient as it is, whatever the configuration says. Returns that optimizer. Raises
        UsageError where it makes no update by itself."""
        ...

    def take(self) -> dict[str, torch.Tensor]:
        """The sums by the parameter's name, out of the engine, which does not touch them from here on. Raises
        ValueError for what `add` could not take back."""
        ...

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add to what the engine has; the tensors become the engine's."""
        ...


class Engine(Witness, Detachable, Protocol):
    """One engine of one generation, on the training thread. Call order:

    1. `state` once, before the first step; where a checkpoint is restored also `load_extra_state`, and then
       `expected_extra_state` and `extra_state` to verify it
    2. for every micro-batch: `forward` (any number of times), `leaves` if need be, `backward` once, `step` once
    3. `state()`'s object and `extra_state` between any two steps, for snapshots
    4. `close` at the end of the generation, before the process groups are destroyed; or `detach`, where `obstacle` has
       none to tell and the next generation builds an engine on the same model and optimizer

    `forward`, `backward` and `step` may be collective, and raise what torch raises when a peer is lost. Nothing here
    scales losses, seeds random streams or deals samples: that is done by `elastic.training`.
    """

    name: str
    # The engine's own object: users reach its attributes through theirs, and it must be garbage after `close`.
    native: Any
    module: torch.nn.Module
    device: torch.device
    # The ranks over which samples are dealt and gradients averaged.
    data_group: dist.ProcessGroup
    # Its collectives; others that belong to the step are counted in it, too.
    ledger: CollectiveLedger
    # Or why a step's sums cannot outlive the engine, as a part of a sentence.
    sums: GradientSums | str
    # False where the engine itself decides which steps are applied and says nothing about it: outcomes are not judged.
    judged: bool

    def forward(self, inputs: Sequence[Any], named: Mapping[str, Any], last: bool | None) -> Any:
        """The model's forward pass. `last`: does this micro-batch end the step? None: not part of a step."""
        ...

    def ends_step(self, last: bool) -> None:
        """Does this micro-batch end the step? Before the backward pass of one whose `forward` was not told so."""
        ...

    def forward_alone(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """A forward pass without collectives, in a step that is abandoned. Where that takes weights of other ranks: the
        zeros in the shape of the last pass; RuntimeError where there was none."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """While the body runs passes without gradients, and of the model itself, take no weights of other ranks where
        they would module by module; all are on each rank then. Collective at its beginning."""
        ...

    def precision(self) -> Precision | None:
        """In which the model would make the same forward pass by itself, before an engine is built on it. None where it
        would be another one: its weights or its layers are shared out."""
        ...

    def backward(self, loss: torch.Tensor, named: Mapping[str, Any]) -> Any:
        """The backward pass of a loss that is scaled already: gradients are averaged over the ranks and over
        `ResolvedConfig.micro_steps`, and added up within the step."""
        ...

    def scale_rates(self, factor: Callable[[], float]) -> None:
        """From the next step on every update is made with the optimizer's learning rates times `factor()`; those that
        its groups show, and that a scheduler sees, stay what they are."""
        ...

    def clip(self, largest: float) -> None:
        """From the next update on gradients are clipped to this L2 norm, over all ranks; 0: not at all."""
        ...

    def step(self, inputs: Sequence[Any], named: Mapping[str, Any], consumed: int) -> StepOutcome | None:
        """After each `backward`: the optimizer's step where `last` was True, else None. `consumed` is how many samples
        the run will have consumed by then."""
        ...

    def leaves(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, as the graph of the last forward pass holds them: a hook on one of them gets
        this rank's gradient of this micro-batch, before anything is added to it or reduced."""
        ...

    def state(self) -> ShardedState:
        """The sharded tensors. Not collective. Raises UsageError for what cannot move to another world size."""
        ...

    def extra_state(self) -> dict[str, Json]:
        """Everything that is neither a tensor nor the optimizer's, as JSON, equal on all ranks: "engine" (counters by
        name), "loss_scaler" ({"kind", "values"}), "scheduler" ({"class", "state"} or None) and, where modules have a
        `get_extra_state`, "modules" (by name; those of rank 0 are the run's).

        Raises UsageError for what JSON cannot hold.
        """
        ...

    def load_extra_state(self, saved: Mapping[str, Json]) -> None:
        """The inverse of `extra_state`, from any world size."""
        ...

    def close(self) -> None:
        """Release the engine, its threads and whatever it left in the process. Never raises; groups may be broken."""
        ...


@dataclass(frozen=True)
class MicroStep:
    """What an engine that orders the passes itself is told of one micro-batch.

    `read()` is its content, (inputs, labels); called where it is needed only, at most once. `before_forward(modules)`
    comes before its forward pass through these modules, of which a rank may have several sets, one for each stage;
    `before_layer(n)` before layer number n of the model computes it, or computes it again.
    `scaled(loss)` is what goes into the backward pass for the micro-batch's mean loss, called once. `samples`: how many
    it has, known to the ranks that do not read it.
    """

    read: Callable[[], Any]
    before_forward: Callable[[Iterable[torch.nn.Module]], None]
    before_layer: Callable[[int], None]
    scaled: Callable[[torch.Tensor], torch.Tensor]
    samples: int = 0


@runtime_checkable
class Pipelined(Protocol):
    """An engine whose ranks have different layers: in the place of `forward`, `backward` and `step`, one call."""

    def train_batch(
        self, steps: Sequence[MicroStep], consumed: int, before_update: Callable[[], None]
    ) -> tuple[torch.Tensor, StepOutcome]:
        """One optimizer step from these micro-batches of this rank: the sum of all scaled losses over the ranks, by the
        number of micro-steps and of data-parallel ranks, and the outcome. `before_update()` comes before the weights
        change. `consumed` as in `Engine.step`. Collective."""
        ...


class EngineKind(GroupHooks, Protocol):
    """One kind of engine in this process. Call order:

    1. `preload`, maybe in a process that is forked then; `warm_up` once per process, before user code runs
    2. for each generation: the `GroupHooks`, `answer_user_calls`, then `resolve` and `build` when the user calls
       `elastic.initialize`

    `cuts_again`: a model that was given back can be built on where another number of ranks shares each layer.
    """

    name: str
    cuts_again: bool

    def preload(self) -> None:
        """Import what the first engine would import. Touches no device and starts no thread: the process may be forked
        later."""
        ...

    def warm_up(self, settings: RunSettings | None) -> None:
        """`preload`, and compile the kernels that the configuration in `settings` needs (None: it is not known yet), so
        that neither a join nor a recovery waits for it."""
        ...

    def answer_user_calls(
        self,
        initialize: Callable[..., Any] | None,
        run_id: str,
        spec: Callable[[], GenerationSpec],
        engines_own: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Until it is called with None: user code that calls the engine's library itself, to build an engine, gets
        `initialize` instead, or a UsageError; it must not train outside of the platform.

        `spec()` is the generation's. Before there is one it waits for it, groups included: where the library would
        answer that nothing is initialized, it is called first. `engines_own()` is around collectives that all ranks
        make, those too whose function is in its loop."""
        ...

    def resolve(self, config: Config | None, spec: GenerationSpec, loader_batch: int | None = None) -> ResolvedConfig:
        """The user's configuration (None: the job's own) at the spec's world size. Pure but for reading a file.
        `loader_batch`: the batch size of the user's own DataLoader, which is the micro-batch.

        Raises UsageError for contradictions and for options that an elastic run cannot honour.
        """
        ...

    def build(
        self,
        resolved: ResolvedConfig,
        nonfinite: Nonfinite | None,
        device: torch.device,
        objects: UserObjects,
        layer_group: dist.ProcessGroup | None = None,
    ) -> tuple[Engine, Any, Any]:
        """The engine, its optimizer and its scheduler as users get them. Collective.

        `layer_group`: the ranks that share each layer with this one, neighbours; None: none do.
        `nonfinite`: what will be done about a step with a non-finite loss or gradient. Unless it is None the engine
        must report `grad_norm` or `applied` truthfully in every outcome, and with "skip" must not apply such a step.
        Raises UsageError where it cannot, and for a model that cannot be resharded.
        """
        ...
