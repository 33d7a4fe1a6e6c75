"""The first pass after a loop was left, of the script's model itself or of a part of it: it gathers weights that are on
several workers, as in `accelerator.unwrap_model(model).generate(...)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


class NextPass:
    """Calls `then`, a method, before the next pass of `model` or of a part of it: once, and not after `forget`. Keeps
    neither alive."""

    def __init__(self, model: torch.nn.Module, then: Callable[[], None]) -> None:
        parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet(model.modules())
        call = weakref.WeakMethod(then)

        # Of a compiled model it would be traced, and what it does be part of a graph.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: torch.nn.Module, _: Any) -> None:
            if module in parts:
                handle.remove()
                if (method := call()) is not None:
                    method()

        # A hook of the model's own would come after those that gather.
        handle = register_module_forward_pre_hook(before)
        self.forget = weakref.finalize(self, handle.remove)
