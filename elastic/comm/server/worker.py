"""A worker of a run with bounded staleness: lease, pull, gradient, push."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from elastic.comm.server.requests import Pull, Push
from elastic.comm.server.shard import OPTIMIZERS, PARAMETER, STEP, Group, Shard, ShardSpec, below, fresh, initial
from elastic.comm.server.shard_client import WAIT_S, ShardClient
from elastic.core.errors import Fenced, IntegrityError, UsageError
from elastic.core.server.global_batches import Answer, Asked, Finished, Given, Lease, Part, Pushed, Unknown, Wait
from elastic.core.server.placement import View, flat_ranges
from elastic.transport.handshake import Address

_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})


class FlatModel:
    """A model's trained parameters as one fp32 vector, in the order of the optimizer's groups."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimizer = optimizer
        self._parameters: list[tuple[str, nn.Parameter]] = [
            (names.get(id(parameter), "?"), parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        why = self._refused(model)
        if why is not None:
            raise UsageError(f"{why}, which a parameter server does not support")
        self.numbers = sum(parameter.numel() for _, parameter in self._parameters)

    def _refused(self, model: nn.Module) -> str | None:
        kind = type(self._optimizer)
        if OPTIMIZERS.get(kind.__name__) is not kind:
            return f"optimizer {kind.__module__}.{kind.__name__} is none of {', '.join(OPTIMIZERS)}"
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                return f"module {name} keeps running statistics of its own samples"
        for name, parameter in self._parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                return f"parameter {name} is {parameter.dtype} on {parameter.device}"
        for group in self._optimizer.param_groups:
            for key, value in group.items():
                if key != "params" and not isinstance(value, int | float | str | tuple | None):
                    return f"option {key} of the optimizer is {type(value).__name__}"
        return None

    def require_fresh(self) -> None:
        """Raises UsageError where the optimizer keeps something already."""
        if self._optimizer.state:
            raise UsageError("the optimizer has made a step already, which a parameter server does not support")

    def groups(self) -> tuple[Group, ...]:
        found, begin = [], 0
        for group in self._optimizer.param_groups:
            end = begin + sum(parameter.numel() for parameter in group["params"])
            options = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
            found.append(Group(begin, end, options))
            begin = end
        return tuple(found)

    def specs(
        self,
        shards: int,
        micros: int,
        cut_every: int = 0,
        rates: Sequence[float] = (1.0,),
        keeps_last: bool = False,
        clips: bool = False,
    ) -> tuple[ShardSpec, ...]:
        """One per shard. The optimizer's learning rates are multiplied by `rates[version]`; the last one holds on."""
        kind = type(self._optimizer).__name__
        return tuple(
            ShardSpec(begin, end, kind, self.groups(), micros, cut_every, tuple(rates), keeps_last, shards, clips)
            for begin, end in flat_ranges(self.numbers, shards)
        )

    def shards(self, specs: Iterable[ShardSpec]) -> list[Shard]:
        """Of a run that begins with the model's parameters."""
        self.require_fresh()
        flat = self.parameters()
        return [fresh(spec, 0, 0, (), initial(spec, flat)) for spec in specs]

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for _, parameter in self._parameters])

    def install(self, flat: torch.Tensor) -> None:
        begin = 0
        with torch.no_grad():
            for _, parameter in self._parameters:
                parameter.copy_(flat[begin : begin + parameter.numel()].view_as(parameter))
                begin += parameter.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and what the optimizer keeps: see `part_of`."""
        found = {}
        for number, group in enumerate(self._optimizer.param_groups):
            parts: dict[str, list[torch.Tensor]] = {PARAMETER: []}
            for parameter in group["params"]:
                parts[PARAMETER].append(parameter.detach().reshape(-1))
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        parts.setdefault(key, []).append(value.detach().reshape(-1))
            for key, each in parts.items():
                found[f"{number}/{key}"] = each[0].clone() if key == STEP else torch.cat(each)
        return found

    @torch.no_grad()
    def install_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `state`, in place where the optimizer keeps something already."""
        for number, group in enumerate(self._optimizer.param_groups):
            begin = 0
            for parameter in group["params"]:
                kept, end = self._optimizer.state[parameter], begin + parameter.numel()
                for key, whole in below(str(number), state).items():
                    part = whole.reshape(()) if key == STEP else whole[begin:end].view_as(parameter)
                    if key == PARAMETER:
                        parameter.copy_(part)
                    elif kept.get(key) is None:
                        kept[key] = part.clone()
                    else:
                        kept[key].copy_(part)
                begin = end

    def gradient(self) -> torch.Tensor:
        """The gradient as one vector; the model keeps it. Zeros for a parameter without one."""
        parts = (p.grad if p.grad is not None else torch.zeros_like(p) for _, p in self._parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    def take_gradient(self) -> torch.Tensor:
        """The gradient as one vector; the model has none afterwards. Raises UsageError for a parameter without one."""
        flat = torch.empty(self.numbers)
        begin = 0
        for name, parameter in self._parameters:
            if parameter.grad is None:
                raise UsageError(f"parameter {name} has no gradient: every parameter must be used in every micro-batch")
            flat[begin : begin + parameter.numel()] = parameter.grad.reshape(-1)
            begin += parameter.numel()
            parameter.grad = None
        return flat


class ServerWorker:
    """One worker. Its name is among the members before it begins; one that was declared lost begins under another.

    for micro in worker.micros():  # the model has the parameters to compute with
        loss_of(micro).backward()  # the mean over the micro-batch's samples
        worker.push()

    The same micro-batch may come twice in a row: what was pushed first was too old.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        addresses: Iterable[Address],
        token: bytes,
        *,
        limit_s: float = 60.0,
    ) -> None:
        self.name = name
        self._model = FlatModel(model, optimizer)
        self._model.require_fresh()
        self._client = ShardClient(addresses, token, limit_s=limit_s)
        self._flat = torch.empty(self._model.numbers)
        self._ranges = flat_ranges(self._model.numbers, len(self._client.view().shards))
        # Updates in each shard's part of `_flat`.
        self._versions = [-1] * len(self._ranges)
        self._lease: Lease | None = None
        self._answer: Answer | None = None

    def micros(self) -> Iterator[int]:
        """Numbers of the micro-batches to compute, until the run is finished; the model has its parameters then.

        Raises Fenced when the worker was declared lost, CollectiveFailed when a shard cannot be reached.
        """
        while True:
            answer = self._client.tell(Asked(self.name, max(0, min(self._versions))), WAIT_S)
            while isinstance(answer, Given):
                self._pull(answer)
                self._lease, self._answer = answer.lease, None
                yield answer.lease.micro
                if self._answer is None:
                    raise UsageError(f"micro-batch {answer.lease.micro} was not pushed before the next was asked for")
                answer = self._answer
            match answer:
                case Finished():
                    self._pull(answer)
                    return
                case Unknown():
                    raise Fenced(answer.why)
                case Wait() | _:
                    continue

    def push(self) -> None:
        """Send the gradients that the model has.

        Raises IntegrityError where they are not finite, and Fenced when the worker was declared lost.
        """
        lease = self._lease
        if lease is None:
            raise UsageError("push() is called once for each micro-batch of micros()")
        self._lease = None
        gradient = self._model.take_gradient()
        if not gradient.isfinite().all():
            raise IntegrityError(f"the gradient of micro-batch {lease.micro} is not finite")

        def send(shard: int) -> None:
            begin, end = self._ranges[shard]
            self._client.ask(
                shard,
                lambda epoch: Push(
                    shard, epoch, "primary", Part(lease.micro, lease.number), (("gradient", end - begin),)
                ),
                (gradient[begin:end],),
            )

        self._client.each(send)
        self._answer = self._client.tell(Pushed(self.name, lease.number))
        if isinstance(self._answer, Unknown):
            raise Fenced(self._answer.why)

    def heard(self, view: View) -> None:
        """See `ShardClient.heard`."""
        self._client.heard(view)

    def close(self) -> None:
        self._client.close()

    def _pull(self, given: Given | Finished) -> None:
        version = given.lease.version if isinstance(given, Given) else given.version

        def pull(shard: int) -> None:
            begin, end = self._ranges[shard]
            have = self._versions[shard]
            message, tensors = self._client.ask(
                shard, lambda epoch: Pull(shard, epoch, version, have, given.batches)
            )  # fmt: skip
            if tensors:
                self._flat[begin:end] = tensors["parameters"]
            self._versions[shard] = message["version"]

        self._client.each(pull)
        self._model.install(self._flat)


def worker_name() -> str:
    """A name that no worker has had."""
    return uuid.uuid4().hex[:12]
