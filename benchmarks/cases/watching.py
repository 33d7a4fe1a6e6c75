"""What watching costs a step: the ledger of collectives, in every step, and gradient noise, in a measured one.

Differences of whole steps would need thousands of them: steps of two ranks on two cores vary by tens of per cent. So
the cost of one counted call is timed by itself, and calls per step are those of a real run of two ranks; and a backward
pass that only hands out gradients is timed with and without what measures their noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import crews
from benchmarks.children import Children, NotMeasured
from benchmarks.figures import Figure, Target, not_measured, ratio
from benchmarks.options import Options
from benchmarks.workload import LARGE, SIZES, TINY, Size, build

CASE = "watching"
RANKS = 2
NOISE_EVERY_STEPS = 10
# The first steps do what is done once.
_WARM_UP = 2
_LEDGER, _NOISE = Target("median", 0.005), Target("median", 0.01)


def measure(options: Options) -> list[Figure]:
    sizes = ["tiny"] if options.quick else ["small", "large"]
    call = Figure(CASE, "one counted call", "s", tuple(_call_s(options) for _ in range(options.pick(9, 2))))
    found = [call]
    for size in sizes:
        for stage in (0, 2, 3):
            found += _ledger(options, size, stage, call)
    return found + _noise(TINY if options.quick else LARGE, options)


def _call_s(options: Options) -> float:
    """Seconds that counting adds to a call, of a collective that does nothing."""
    import torch

    from elastic.comm.collective_ledger import CollectiveLedger

    tensor, calls = torch.zeros(1000), options.pick(20_000, 200)
    ledger = CollectiveLedger(torch.device("cpu"), {})

    def plain(tensor: torch.Tensor) -> None:
        return None

    counted = ledger.timed("all_reduce", plain, axis="dp")

    def spent(call: Callable[[Any], Any]) -> float:
        return _timed(lambda: [call(tensor) for _ in range(calls)]) / calls

    return spent(counted) - spent(plain)


def _ledger(options: Options, size: str, stage: int, call: Figure) -> list[Figure]:
    name = f"{size}, ZeRO-{stage}"
    folder = options.make_folder(f"{size}-{stage}")
    with Children(options.make_folder(f"logs-{size}-{stage}")) as children:
        try:
            job: dict[str, Any] = {"size": size, "stage": stage, "folder": str(folder), "steps": options.pick(20, 4)}
            steps = crews.do(children, "own_steps", RANKS, **job)[0]["steps"][_WARM_UP:]
        except NotMeasured as error:
            return [not_measured(CASE, f"ledger over a step: {name}", "x", str(error), targets=(_LEDGER,))]
    calls = Figure(CASE, f"collectives in a step: {name}", "calls", tuple(step["calls"] for step in steps))
    per_call = sorted(call.values)[len(call.values) // 2]
    shares = tuple(step["calls"] * per_call / step["seconds"] for step in steps)
    note = f"{RANKS} ranks, micro-batches of {SIZES[size].micro}; a step's calls times the median of one, over its time"
    return [calls, Figure(CASE, f"ledger over a step: {name}", "x", shares, targets=(_LEDGER,), notes=(note,))]


def _noise(size: Size, options: Options) -> list[Figure]:
    """Of one rank and one micro-batch. The other steps have no hooks."""
    import torch

    model, optimizer, data = build(size)
    tokens = torch.stack([torch.as_tensor(data[number]) for number in range(size.micro)])
    micro_s, added_s = [], []
    for _ in range(options.pick(20, 3) + _WARM_UP):
        optimizer.zero_grad()
        micro_s.append(_timed(lambda: model(tokens).backward()))
        added_s.append(_noise_s(dict(model.named_parameters())))
    note = f"{size.name} model, a micro-batch of {size.micro} windows of {size.context} bytes"
    micro = Figure(CASE, "a micro-batch", "s", tuple(micro_s[_WARM_UP:]), notes=(note,))
    noise = Figure(CASE, "its gradient's noise, in a measured step", "s", tuple(added_s[_WARM_UP:]), notes=(note,))
    spread = tuple(value / NOISE_EVERY_STEPS for value in noise.values)
    shared = Figure(CASE, f"the same, with every_steps: {NOISE_EVERY_STEPS}", "s", spread)
    what = f"gradient noise over a micro-batch, with every_steps: {NOISE_EVERY_STEPS}"
    return [micro, noise, shared, ratio(CASE, what, shared, micro, _NOISE)]


def _noise_s(leaves: dict[str, Any]) -> float:
    """A backward pass that hands out the gradients that are there, measured, less the same one unmeasured."""
    import torch

    from elastic.engines.gradient_squares import GradientSquares

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Any, gradient: Any) -> Any:
            ctx.gradient = gradient
            return leaf.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return ctx.gradient, None

    class Engine:
        def leaves(self) -> dict[str, Any]:
            return leaves

    give: Callable[..., Any] = Given.apply
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    squares, stand_in = GradientSquares(1), Engine()
    spent = []
    for step in (None, 1):
        for leaf in leaves.values():
            leaf.grad = None
        loss = torch.stack([give(leaves[name], gradient) for name, gradient in gradients.items()]).sum()
        if step is None:
            spent.append(_timed(loss.backward))
            continue

        def measured(loss: Any = loss) -> None:
            engine: Any = stand_in
            with squares.around(1, engine, loss, 1.0, 0.5):
                loss.backward()

        spent.append(_timed(measured))
    return spent[1] - spent[0]


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
