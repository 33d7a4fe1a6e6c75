"""What to write where an exception of the user's code says that it expects another launcher."""

from __future__ import annotations

import traceback

_TWICE = "trying to initialize the default process group twice"
# torch's GradScaler, of an optimizer whose gradients DeepSpeed holds.
_UNSCALED = "No inf checks were recorded for this optimizer"
# torch's schedulers, of what `elastic.initialize` returned for an optimizer of DeepSpeed's.
_NO_OPTIMIZER = "StandIn is not an Optimizer"


NO_BATCH = (
    "A function that is called again in a later epoch finds its iterations of the earlier epochs empty; where it calls "
    "next() by itself (DeepSpeed's RepeatingLoader does), write `batches = (batch for _ in elastic.epochs() for batch "
    "in loader)`"
)


def advice(error: BaseException) -> str | None:
    """One sentence, or None: the exception says enough itself."""
    if isinstance(error, ValueError) and _TWICE in str(error):
        return (
            "torch.distributed.init_process_group: the process group is formed before the training function is called, "
            "and anew when the number of workers changes; remove the call, and that of destroy_process_group"
        )
    if isinstance(error, AssertionError) and _UNSCALED in str(error):
        return (
            "torch.amp.GradScaler has found no gradients: DeepSpeed has them, and scales by itself; remove the scaler, "
            'give `"fp16": {"enabled": true}` or `"bf16"` in the DeepSpeed configuration, and call '
            "engine.backward(loss) and engine.step()"
        )
    if isinstance(error, TypeError) and _NO_OPTIMIZER in str(error):
        return (
            "a scheduler of torch's was given the optimizer that elastic.initialize returned, which is DeepSpeed's: "
            "build the scheduler on the optimizer that was given to elastic.initialize; it is found and kept"
        )
    if _steps_by_itself(error):
        return (
            f"optimizer.step() was called by the training function and has failed ({type(error).__name__}: {error}): "
            "call engine.backward(loss) instead of loss.backward(), and engine.step(), which makes the optimizer's "
            "step and zeroes the gradients"
        )
    if isinstance(error, StopIteration):
        return f"StopIteration: the loader had no batch for next(). {NO_BATCH}"
    if isinstance(error, SystemExit) and error.code == 2:
        return (
            "the training function has parsed a command line (SystemExit: 2, see the worker's output): a worker's is "
            "Ray's own; take options from the function's argument, `def train(config)`, which is the job's `config`; "
            "`parser.parse_args([], argparse.Namespace(**config))` keeps the parser's defaults; "
            "remove required=True"
        )
    return None


def _steps_by_itself(error: BaseException) -> bool:
    """Was it raised in the step of an optimizer of DeepSpeed's that no engine has called?"""
    places = [
        (str(frame.f_globals.get("__name__", "")), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    in_step = any(module.startswith("deepspeed.runtime.") and name == "step" for module, name in places)
    return in_step and not any(module == "elastic.training.engine" for module, _ in places)
