"""With a key of the operator's, what somebody else wrote into storage is refused, and what is signed is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs.commands import resume
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.live import Live, read_live, write_live
from elastic_jobs.signing import KEY, KEY_FILE, key_from_environment

from elastic.core.errors import UsageError

KEY_TEXT = "0123456789abcdef0123456789abcdef"
JOB: dict[str, Any] = {"entry_point": "train.py:train", "config": {"lr": [0.1, None]}}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.delenv(KEY_FILE, raising=False)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.write_text(f"{KEY_TEXT}\n")
    file.chmod(0o600)
    monkeypatch.setenv(KEY_FILE, str(file))
    return file


def stored(url: Path, name: str = "job.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((url / "r" / name).read_text())
    return found


def change(url: Path, **fields: Any) -> None:
    (url / "r" / "job.json").write_text(json.dumps({**stored(url), **fields}))


def test_what_was_written_with_the_key_is_read_with_it(key: Path, tmp_path: Path) -> None:
    RunFolder(str(tmp_path), "r").claim(JOB)
    folder = RunFolder(str(tmp_path), "r")
    read = folder.read("job.json")
    assert read is not None
    assert {name: read[name] for name in JOB} == JOB
    assert "signature" not in read
    assert KEY_TEXT not in (tmp_path / "r" / "job.json").read_text()
    assert folder.signed


@pytest.mark.parametrize(
    "fields",
    [
        {"entry_point": "evil.py:train"}, {"config": {"lr": [0.1, 0]}}, {"new": 1}, {"signature": "0" * 64},
        {"signature": 7}, {"signature": None},
    ],
)  # fmt: skip
def test_what_was_changed_is_refused(key: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = RunFolder(str(tmp_path), "r")
    folder.write("job.json", JOB)
    change(tmp_path, **fields)
    with pytest.raises(UsageError, match=r"job\.json of run 'r' .* that ELASTIC_SIGNING_KEY_FILE gives"):
        folder.read("job.json")
    assert folder.read("job.json", unsigned=True) is not None


def test_what_was_written_without_the_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(str(tmp_path), "r").write("job.json", JOB)
    monkeypatch.setenv(KEY, KEY_TEXT)
    with pytest.raises(UsageError, match=r"job\.json of run 'r' has no signature that ELASTIC_SIGNING_KEY gives"):
        RunFolder(str(tmp_path), "r").read("job.json")
    monkeypatch.setenv(KEY, KEY_TEXT[::-1])
    RunFolder(str(tmp_path), "r").write("job.json", JOB)
    monkeypatch.setenv(KEY, KEY_TEXT)
    with pytest.raises(UsageError, match="is not signed with the key"):
        RunFolder(str(tmp_path), "r").read("job.json")


def test_a_signature_counts_for_its_run_and_its_file_only(key: Path, tmp_path: Path) -> None:
    RunFolder(str(tmp_path), "r").write("job.json", JOB)
    for run, name in (("other", "job.json"), ("r", "live.json")):
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / name).write_text((tmp_path / "r" / "job.json").read_text())
        with pytest.raises(UsageError, match="is not signed with the key"):
            RunFolder(str(tmp_path), run).read(name)


def test_without_a_key_signed_and_unsigned_files_are_read(key: Path, tmp_path: Path, monkeypatch: Any) -> None:
    RunFolder(str(tmp_path), "r").write("job.json", JOB)
    monkeypatch.delenv(KEY_FILE)
    folder = RunFolder(str(tmp_path), "r")
    assert (folder.read("job.json"), folder.signed) == (JOB, False)


def test_a_signed_address_is_believed_and_another_is_not(key: Path, tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "r")
    write_live(folder, Live("10.0.0.5:6379"))
    assert read_live(folder) == Live("10.0.0.5:6379")
    forged = {**stored(tmp_path, "live.json"), "address": "6.6.6.6:6379"}
    (tmp_path / "r" / "live.json").write_text(json.dumps(forged))
    with pytest.raises(UsageError, match=r"live\.json of run 'r' is not signed"):
        read_live(folder)


def test_resume_refuses_a_forged_job(key: Path, tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "r")
    folder.write("job.json", JOB)
    change(tmp_path, entry_point="evil.py:train")
    options: Any = type("Options", (), {"job": None, "trust_storage": True})
    with pytest.raises(UsageError, match="somebody else wrote or changed it"):
        resume._job(options, folder)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(key: Path, mode: int) -> None:
    key.chmod(mode)
    with pytest.raises(UsageError, match="can be read by others; `chmod 600"):
        key_from_environment()


def test_a_key_that_is_missing_short_or_given_twice_is_refused(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key.write_text("short")
    with pytest.raises(UsageError, match=r"has 5 bytes; at least 16"):
        key_from_environment()
    key.unlink()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        key_from_environment()
    monkeypatch.setenv(KEY, KEY_TEXT)
    with pytest.raises(UsageError, match="both set"):
        key_from_environment()
