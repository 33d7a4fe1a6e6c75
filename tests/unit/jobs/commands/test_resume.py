"""elastic resume over fakes: whose job and checkpoints are taken, and when it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_fakes import FakeBackend, put_checkpoint, refuse, saved
from elastic_jobs import cli
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.handle import FakeHandle
from elastic_jobs.running.live import Live, read_live, write_live

from elastic.core.errors import TokenRefused
from elastic.observe.journal import JournalWriter


def test_resume_takes_the_job_as_it_was(job: Path) -> None:
    first, second = FakeBackend("gave-up"), FakeBackend()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], first) == 104
    job.unlink()
    assert cli.main(["resume", "r1", "--max-steps", "20"], second) == 0
    (_, before, entry, config, _), (_, after, entry_2, config_2, _) = first.calls[1], second.calls[1]
    assert (entry, config) == (entry_2, config_2)
    assert after.max_steps == 20
    assert after.checkpoint == before.checkpoint


@pytest.mark.parametrize("command", [["resume", "r1"], ["resume", "r1", "--job", "job.yaml"]])
def test_steps_that_take_the_place_of_epochs_are_told(
    job: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Seen: the job's epochs were gone without a word."""
    job.write_text(job.read_text().replace("max_steps: 10", "epochs: 3"))
    first, second = FakeBackend("gave-up"), FakeBackend()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], first) == 104
    assert first.calls[1][1].epochs == 3
    assert cli.main([*command, "--max-steps", "20"], second) == 0
    assert (second.calls[-1][1].max_steps, second.calls[-1][1].epochs) == (20, None)
    assert capfd.readouterr().err.count("--max-steps 20 takes the place of the job's `epochs: 3`") == 1


SEVERAL = "global_batch: 8\nmicro_batch: 1\nmesh: {tp: [1, 4]}\n"


@pytest.mark.parametrize(
    ("before", "now"),
    [("", "mesh: {tp: 2}\n"), ("mesh: {tp: 2}\n", "mesh: {tp: 4}\n"), ("mesh: {tp: 4}\n", SEVERAL)],
)
def test_another_number_of_workers_that_share_each_layer_is_told(
    job: Path, before: str, now: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = job.read_text()
    job.write_text(plain + before)
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("gave-up")) == 104
    assert "dropout" not in capfd.readouterr().err
    job.write_text(plain + now)
    resumed = FakeBackend()
    assert cli.main(["resume", "r1", "--job", "job.yaml"], resumed) == 0
    assert resumed.calls[-1][1].mesh.tp in (2, 4)
    said = capfd.readouterr().err
    assert said.count("dropout inside layers that are cut is drawn anew, and all else goes on as it was") == 1
    within = "run r1: mesh.tp may change within the run: dropout inside layers that are cut is drawn anew then"
    assert said.count(within) == (now == SEVERAL)


def test_resume_of_a_run_that_goes_on_is_refused(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    alive = FakeBackend()
    assert cli.main(["resume", "r1"], alive) == 2
    assert "elastic watch r1" in capfd.readouterr().err
    silent = FakeBackend()
    silent.attach_run = refuse  # type: ignore[method-assign]
    assert cli.main(["resume", "r1"], silent) == 0
    assert "cannot be reached at a:1: nobody answers; it counts as ended" in capfd.readouterr().err
    write_live(RunFolder("runs", "r1"), Live("a:1"))
    gone = FakeBackend()
    gone.reachable = False
    assert cli.main(["resume", "r1"], gone) == 0
    assert "considered over" not in capfd.readouterr().err


@pytest.mark.parametrize(("where", "hint"), [([], True), (["--address", "a:1"], False)])
def test_resume_does_not_go_on_where_it_may_not_look(
    job: Path, where: list[str], hint: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    write_live(RunFolder("runs", "r1"), Live("a:1"))

    class Locked(FakeBackend):
        def attach_run(self, run_id: str, address: str) -> FakeHandle:
            raise TokenRefused("the Ray cluster at 'a:1' asks for a token")

    capfd.readouterr()
    locked = Locked()
    assert cli.main(["resume", "r1", *where], locked) == 2
    err = capfd.readouterr().err
    assert "run 'r1' cannot be reached at a:1: the Ray cluster at 'a:1' asks for a token" in err
    assert ("remove live.json" in err) is hint
    assert err.count("\n") == 1
    assert locked.calls == []
    assert read_live(RunFolder("runs", "r1")) == Live("a:1")


@pytest.mark.parametrize("more", [[], ["--max-steps", "10"]])
def test_resume_of_a_finished_run_says_so_at_once(
    job: Path, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0
    capfd.readouterr()
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--json", *more], backend) == 0
    out, err = capfd.readouterr()
    assert "run r1 is finished after step 10" in err
    assert json.loads(out)["steps"] == 10
    assert backend.calls == []
    assert cli.main(["resume", "r1", "--max-steps", "20"], backend) == 0
    assert backend.calls[-1][1].max_steps == 20


def test_an_end_before_what_is_done_is_refused_and_nothing_changes(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend("stopped")) == 103
    JournalWriter("runs", "r1").append({"type": "checkpoint", "id": "step-00000012-g0001", "step": 12})
    put_checkpoint("runs", 12)
    before = RunFolder("runs", "r1").read("job.json")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--max-steps", "11"], backend) == 2
    assert "--max-steps 11 is below the 12 steps that run 'r1' has done already" in capfd.readouterr().err
    assert (backend.calls, RunFolder("runs", "r1").read("job.json")) == ([], before)
    assert cli.main(["resume", "r1", "--max-steps", "12"], backend) == 0
    assert backend.calls[-1][1].max_steps == 12


def test_a_moved_run_goes_on_from_its_own_checkpoints(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved("runs", 7)
    shutil.copytree("runs", "elsewhere")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], backend) == 0
    settings = backend.calls[-1][1]
    assert settings.checkpoint.url == settings.storage_url == str(Path("elsewhere").absolute())
    shutil.rmtree("elsewhere/r1/checkpoints")
    assert cli.main(["resume", "r1", "--storage", "elsewhere", "--max-steps", "99"], backend) == 2
    assert "lists 1 checkpoints, the last of step 7, and none is in" in capfd.readouterr().err


def test_a_copy_of_a_run_may_not_delete_the_checkpoints_of_the_original(
    job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job.write_text(job.read_text() + "checkpoint: {url: ./saved}\nstorage_url: ./runs\n")
    saved("runs", 7)
    shutil.move("runs/r1/checkpoints", "saved/r1/checkpoints")
    shutil.copytree("runs", "elsewhere")
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], FakeBackend()) == 2
    assert "is a copy: run 'r1' is still in" in capfd.readouterr().err
    shutil.rmtree("runs/r1")
    backend = FakeBackend()
    assert cli.main(["resume", "r1", "--storage", "elsewhere"], backend) == 0
    assert backend.calls[-1][1].checkpoint.url == str(Path("saved").absolute())


def test_a_job_file_that_is_cut_off_is_said_with_the_way_out(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved("runs", 7)
    file = Path("runs/r1/job.json")
    file.write_bytes(file.read_bytes()[:40])
    assert cli.main(["resume", "r1"], FakeBackend()) == 106
    err = capfd.readouterr().err
    assert "job.json of run 'r1'" in err
    assert "remove that file, then `elastic run JOB.yaml --run-id r1` continues from the newest checkpoint" in err
    file.unlink()
    assert cli.main(["run", "job.yaml", "--run-id", "r1"], FakeBackend()) == 0
