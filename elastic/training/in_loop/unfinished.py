"""Between two engines: do a rank's sums still belong to the state that was restored, and what is left of the step?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from elastic.checkpoint.digest import digest, digest_on_device
from elastic.comm.agreement import Agreement
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.unfinished import rest_of
from elastic.core.generation_spec import GenerationSpec
from elastic.training.in_loop.step_share import Unfinished


def refused(plan: StepPlan, spec: GenerationSpec) -> str | None:
    """Why a step of this plan is not continued, the same on every rank; empty where no pass could be saved."""
    if plan.micro_steps < 2:
        return ""
    if plan.adaptive is not None:
        return "the batch follows the number of workers"
    if plan.stream:
        return "the readers of a stream read whole steps"
    if spec.communication is not None and spec.communication.semantics == "local":
        return "islands go back to their last outer step"
    if spec.communication is not None and spec.communication.semantics == "async":
        return "a run whose gradients are applied late goes back to the end of a round"
    if spec.audit_every_steps is not None:
        return "audits repeat micro-batches of other ranks"
    return "the ranks of a cell hold parts of them" if spec.mesh.dp != spec.world_size else None


def fingerprint(module: torch.nn.Module) -> dict[str, float]:
    """Digests of the parameters and buffers, of which gradients are a function; what has none equals nothing."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _digest(value.detach(), name) for name, value in tensors.items() if value.numel()}


def _digest(value: torch.Tensor, name: str) -> float:
    try:
        on_host = value.device.type == "cpu"
        return digest(value.reshape(-1).contiguous(), name) if on_host else digest_on_device(value, name)
    except KeyError:
        # Of another dtype than checkpoints have.
        return math.nan


def continued(
    held: Unfinished | None,
    plan: StepPlan,
    step: int,
    module: torch.nn.Module,
    user: Mapping[str, int],
    agreement: Agreement,
) -> tuple[StepPlan, Unfinished | None, str]:
    """The plan by which the ranks go on after `step` finished steps: with the rest of the next step, where enough of it
    is held. Then also what this rank brings along, else why it has nothing to bring. `user`: fingerprints of the user's
    state as it was restored. Collective, one exchange."""
    whole = replace(plan, world_size=1, rank=0).deal(step)
    why = "" if held is None else held.why or _changed(held, whole, step, module, user)
    offers = [0] * len(whole)
    if held is not None and not why:
        for batch in held.batches:
            offers[batch.index] = 1
    rest = rest_of(step, agreement.sums(offers), plan.world_size)
    if rest is None:
        return plan, None, why or ("" if held is None else "no pass is saved by what is left")
    return replace(plan, rest=rest), None if why else held, why


def _changed(
    held: Unfinished, whole: tuple[object, ...], step: int, module: torch.nn.Module, user: Mapping[str, int]
) -> str:
    """Why the sums do not belong to the state that was restored; empty where they do."""
    if held.step != step:
        return f"they are of the step after {held.step}, and the state after step {step} was restored"
    if not set(held.batches) <= set(whole):
        return "the samples of the step are others"
    found = fingerprint(module)
    name = _first_difference(held.weights, found)
    if name is not None:
        return f"{name!r} is not what it was: a buffer that forward passes change, or other weights"
    # What the loop has made of it is undone. A name that is not in `held.user` was set by other ranks.
    name = next((name for name, value in held.user.items() if user.get(name) != value), None)
    return "" if name is None else f"{name} is not what was restored: the loop has changed it within the step"


def _first_difference(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    return next((name for name in (*before, *now) if before.get(name) != now.get(name)), None)
