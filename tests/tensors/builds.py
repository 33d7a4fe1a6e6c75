"""Builds one operator, as a worker does: `python builds.py FOLDER OPERATOR`, or a source file in OPERATOR's place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elastic.engines.build_lock import install


def main(folder: str, what: str) -> None:
    # Read when torch looks for its folders.
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    install()
    if what.endswith(".cpp"):
        from torch.utils import cpp_extension

        build = Path(folder) / "small"
        build.mkdir(exist_ok=True)
        cpp_extension.load("small", [what], build_directory=str(build), is_python_module=False, with_cuda=False)
    else:
        from deepspeed.ops import op_builder

        getattr(op_builder, f"{what}Builder")().load(verbose=False)
    sys.stdout.write("built\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
