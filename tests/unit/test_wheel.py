"""What `make wheel` builds: exactly our three packages with their data, and a command that works outside of the
checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"elastic": ROOT / "elastic", "elastic_jobs": ROOT / "jobs", "elastic_cluster": ROOT / "cluster"}
# Modules of a user's own, with names that this project had once or might be thought to have.
OWN = ("jobs.py", "cluster.py", "utils.py", "elastic_test.py", "core.py", "training.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, but without network: the build backend is the one that is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("elastic", "jobs", "cluster", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, whose dependencies are those of this one."""
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=100)
    (packages,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A path alone: an editable installation that lies there too is not looked at.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return place / "bin" / "python"


def run(python: Path | str, folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    return subprocess.run(
        [str(python), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for name in OWN:
        (tmp_path / name).write_text(f"raise SystemExit('the own {name} of the user was imported')\n")
    (tmp_path / "train.py").write_text("def main(config): ...\n")
    (tmp_path / "job.yaml").write_text(
        "name: own\nentry_point: train.py:main\nmax_workers: 2\nstorage_url: s3://bucket/runs\n"
        "kubernetes: {image: mine/image}\n"
    )
    return tmp_path


def test_it_holds_our_packages_and_their_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("ray_elastic-")}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "elastic = elastic_jobs.cli:main" in archive.read(entry_points).decode()
    assert {name.partition("/")[0] for name in names} == PACKAGES.keys()
    wanted = set()
    for package, home in PACKAGES.items():
        base = home.parent if package == "elastic" else home
        for path in (base / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(str(path.relative_to(base)))
    assert names == wanted


def test_the_command_works_outside_of_the_checkout(installed: Path, job: Path) -> None:
    where = run(installed, job, "-c", "import elastic, elastic_jobs; print(elastic.__file__)")
    assert where.stdout.startswith(str(installed.parents[1])), where.stderr
    rendered = run(installed, job, "-m", "elastic_jobs.cli", "kube", "render", "job.yaml")
    assert rendered.returncode == 0, rendered.stderr
    assert "kind: RayJob" in rendered.stdout


@pytest.mark.parametrize(
    ("words", "environment", "code", "said"),
    [
        (["elastic_jobs.cli", "kube", "render", "job.yaml"], {}, 0, "kind: RayJob"),
        (["elastic_jobs.running.background"], {}, 1, "Expecting value"),
        (
            ["elastic_jobs.submit.driver", "job.yaml", "--run-id", "r", "--storage", "/x", "--client-version", "0"],
            {},
            2,
            "install the same",
        ),
    ],
    ids=["render", "background", "driver"],
)
def test_own_modules_of_the_job_are_not_taken_for_ours(
    job: Path, words: list[str], environment: Mapping[str, str], code: int, said: str
) -> None:
    """As in a job's folder: it comes first on the import path, as the folder of the process and of its workers."""
    path = os.pathsep.join([str(job), str(ROOT), str(ROOT / "jobs"), str(ROOT / "cluster")])
    done = run(sys.executable, job, "-m", *words, PYTHONPATH=path)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "of the user was imported" not in done.stdout + done.stderr
