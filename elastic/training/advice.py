"""What to write where an exception of the user's code says that it expects another launcher."""

from __future__ import annotations

_TWICE = "trying to initialize the default process group twice"


def advice(error: BaseException) -> str | None:
    """One sentence, or None: the exception says enough itself."""
    if isinstance(error, ValueError) and _TWICE in str(error):
        return (
            "torch.distributed.init_process_group: the process group is formed before the training function is called, "
            "and anew when the number of workers changes; remove the call, and that of destroy_process_group"
        )
    if isinstance(error, StopIteration):
        return (
            "StopIteration: the loader had no batch for next(). A function that is called again in a later epoch finds "
            "its iterations of the earlier epochs empty; where it calls next() by itself, write `batches = (batch for "
            "_ in elastic.epochs() for batch in loader)`"
        )
    if isinstance(error, SystemExit) and error.code == 2:
        return (
            "the training function has parsed a command line (SystemExit: 2, see the worker's output): a worker's is "
            "Ray's own; take options from the function's argument, `def train(config)`, which is the job's `config`"
        )
    return None
