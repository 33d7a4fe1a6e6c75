"""What `make demo` leaves behind when it is ended from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_ends_its_run(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "elastic_jobs").mkdir()
    (tmp_path / "elastic_jobs" / "__init__.py").touch()
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    # In the place of the command line.
    told = f"import os, signal\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\nwhile True: signal.pause()\n"
    (tmp_path / "elastic_jobs" / "cli.py").write_text(told)
    # A shell has its background jobs ignore SIGINT.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{begin}; import demo, pathlib; demo.run(pathlib.Path({str(tmp_path)!r}), 'run')"
    path = os.pathsep.join([str(tmp_path), str(ROOT / "examples"), str(ROOT)])
    demo = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    run = int(begun.read_text())
    demo.send_signal(how)
    assert demo.wait(60.0) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(run, 0)
