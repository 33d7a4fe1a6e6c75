"""Imported by the process that `forks` forks, and by nothing else: it has one thread then, and has used no device."""

import elastic.training.in_loop.function_call
import elastic.training.local
import elastic.training.loop  # noqa: F401
from elastic.engines.select import engine_kind

for _engine in ("deepspeed", "fsdp2"):
    engine_kind(_engine).preload()
