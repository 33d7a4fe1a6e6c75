"""The FLOPs of one micro-batch, by torch's own formulas, while it is trained on.

torch's `FlopCounterMode` counts by module, with hooks on every module and on their tensors, which stay on the graph. A
bare dispatch mode over the same table of formulas sees the same operations and leaves nothing behind. Operations
without a formula (element-wise ones, kernels of libraries that register none) count as nothing.

What torch.compile has made runs uncompiled under a dispatch mode, which would change the last bits of that pass. Then
nothing is counted, and the estimate 6 N D is made of the N trained elements that get a gradient and of D tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elastic.engines.base import Engine
from elastic.engines.model.compiled import compiles

logger = logging.getLogger(__name__)


class FlopCount:
    """Of one micro-batch: `forward` and `backward` go around its passes, `of_sample` comes after them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mode: _Mode | None = None
        self._elements = 0

    def forward(self) -> AbstractContextManager[Any]:
        # Not earlier: engine.compile() comes after the engine.
        if self._mode is None and not compiles():
            self._mode = _Mode()
        return nullcontext() if self._mode is None else self._mode

    @contextmanager
    def backward(self) -> Iterator[None]:
        if self._mode is not None:
            with self._mode:
                yield
            return
        leaves: list[Any] = list(self._engine.leaves().values())
        hooks = [leaf.register_hook(self._seen) for leaf in leaves]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of_sample(self, samples: int, tokens: int, shares: int) -> float:
        """FLOPs of one of the micro-batch's `samples`, which have `tokens` in all (0: not known) and of which `shares`
        ranks compute a part each. Negative where they are estimated; 0.0 where nothing is known."""
        if self._mode is not None:
            return float(self._mode.flops or 0) * shares / samples
        return -6.0 * self._elements * tokens / samples

    def _seen(self, gradient: torch.Tensor) -> None:
        self._elements += gradient.numel()


# torch does not type it.
class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`flops` is None where a formula did not understand its operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if formula is not None and self.flops is not None:
            try:
                self.flops += formula(*args, **named, out_val=result)
            except Exception as error:  # noqa: BLE001 - any formula may fail, and the run continues
                logger.warning("the FLOPs of the model are not counted: %s: %s", func, error)
                self.flops = None
        return result
