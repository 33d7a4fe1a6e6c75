"""elastic export: the weights of a checkpoint in the format of another library."""

from __future__ import annotations

import argparse
import os

from elastic.core.errors import UsageError
from elastic.core.names import parse_checkpoint_id
from elastic_jobs.commands.common import folder_of, positive, storage_argument
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put

HELP = "write the weights of a checkpoint as safetensors, for Hugging Face, torch, DCP or DeepSpeed"
EXAMPLE = """\
elastic export gpt-20260102-030405-ab12 --to hf ./gpt --dtype bfloat16
  elastic export runs/gpt-20260102-030405-ab12/checkpoints/step-00000140-g0003 --to safetensors ./weights"""

_FORMATS = ("safetensors", "hf", "torch", "dcp", "deepspeed-universal")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="run id, or path or URL of a checkpoint's folder")
    parser.add_argument("directory", metavar="DIR", help="the folder to make")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="the format")
    parser.add_argument("--checkpoint", metavar="ID", help="which checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="cast floating-point tensors (default: as stored)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in DIR")
    parser.add_argument(
        "--max-file-mb", type=positive, metavar="N", default=5000, help="safetensors, hf: size of a file (default 5000)"
    )
    parser.add_argument(
        "--config", metavar="DIR", help="hf: a model's folder whose configuration and tokenizer are copied"
    )
    storage_argument(parser)


def run(options: argparse.Namespace, backend: Backend) -> int:
    # Imported late: torch takes a second.
    from elastic.interchange.export import export

    folder = export(
        _address(options),
        options.directory,
        to=options.to,
        dtype=options.dtype,
        overwrite=options.overwrite,
        max_file_bytes=options.max_file_mb * 10**6,
        config=options.config,
    )
    put(str(folder))
    return 0


def _address(options: argparse.Namespace) -> str:
    """The folder of a checkpoint, or of a run for its newest one. A run's name is looked up in its storage."""
    given = str(options.run)
    if "/" in given or os.path.isdir(given):
        if options.checkpoint:
            raise UsageError("--checkpoint goes with a run id; this is the address of a checkpoint already")
        return given
    settings = folder_of(options).read_job().settings
    run = f"{settings.checkpoint.url.rstrip('/')}/{settings.run_id}"
    return f"{run}/checkpoints/{_checked(options.checkpoint)}" if options.checkpoint else run


def _checked(checkpoint: str) -> str:
    return parse_checkpoint_id(checkpoint).id
