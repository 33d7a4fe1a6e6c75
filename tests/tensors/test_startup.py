"""What DeepSpeed compiles while it is imported."""

from __future__ import annotations

import subprocess
import sys

_IMPORTED = """
import sys
from elastic.engines.deepspeed.startup import preload
preload()
assert "torch._inductor.compile_fx" not in sys.modules
"""
_CALLED = """
import torch
torch.compiler.set_stance("force_eager")
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
names = ("muon_update", "zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5")
plain = {name: getattr(original_muon, name).__wrapped__ for name in names}
momentum, gradient = torch.zeros(4, 6), torch.arange(24.0).view(4, 6)
made = muon_optimizer.muon_update(gradient.clone(), momentum)
assert torch.equal(made, plain["muon_update"](gradient.clone(), torch.zeros(4, 6))) and made.abs().sum() > 1
for name in names:
    # None of them calls a stand-in, which the compiler would go through.
    assert getattr(original_muon, name)._torchdynamo_orig_callable is plain[name], name
"""


def test_the_compiler_is_loaded_by_the_first_call() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTED + _CALLED], check=True, timeout=120)
