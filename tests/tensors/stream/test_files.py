"""Files as streams: every document once, and reading resumes at every one of them, compressed or not."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.core.errors import UsageError
from elastic.training.data.stream.files import FileDocuments, Files, jsonl, text, webdataset

FILES = 3
LINES = 4
# Longer than a header of a tar file has room for: an extended header comes before it.
LONG = "x" * 120


def lines_of(number: int) -> list[dict[str, Any]]:
    return [{"id": f"{number}-{line}", "text": "wörter " * line} for line in range(LINES)]


def write_jsonl(folder: Path, ending: str = "") -> None:
    for number in range(FILES):
        content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines_of(number)).encode()
        path = folder / f"part-{number}.jsonl{ending}"
        path.write_bytes(gzip.compress(content) if ending else content)


def write_text(folder: Path, ending: str = "") -> None:
    for number in range(FILES):
        content = "".join(f"{line['id']}\n" for line in lines_of(number)).encode()
        path = folder / f"part-{number}.txt{ending}"
        path.write_bytes(gzip.compress(content) if ending else content)


def write_tars(folder: Path, ending: str = "") -> None:
    for number in range(FILES):
        with tarfile.open(folder / f"part-{number}.tar{ending}", "w:gz" if ending else "w") as archive:
            folders = tarfile.TarInfo("images")
            folders.type = tarfile.DIRTYPE
            archive.addfile(folders)
            for line in lines_of(number):
                for name, content in (("json", json.dumps(line).encode()), ("seg.png", b"\x00" * 700)):
                    member = tarfile.TarInfo(f"images/{LONG}{line['id']}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


KINDS: dict[str, tuple[Callable[..., None], Callable[..., Files], Callable[[Any], str]]] = {
    "jsonl": (write_jsonl, jsonl, lambda document: str(document["id"])),
    "text": (write_text, text, str),
    "webdataset": (write_tars, webdataset, lambda sample: str(json.loads(sample["json"])["id"])),
}
ALL = [line["id"] for number in range(FILES) for line in lines_of(number)]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_resumes_at_every_document(kind: str, ending: str, tmp_path: Path) -> None:
    write, files, name = KINDS[kind]
    write(tmp_path, ending)
    (tmp_path / "README.md").write_text("not a part of it")
    opened = files(str(tmp_path))
    assert [name(document) for document in opened(0, 1)] == ALL
    states = []
    reading = opened(0, 1)
    for document in reading:
        states.append((name(document), json.loads(json.dumps(reading.state_dict()))))
    for number, (_, state) in enumerate(states):
        resumed = opened(0, 1)
        resumed.load_state_dict(state)
        assert [name(document) for document in resumed] == ALL[number + 1 :]


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_readers_share_all_documents(striped: bool, readers: int, tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    files = jsonl(str(tmp_path), striped=striped)
    files.check(readers)
    shares = [[document["id"] for document in files(reader, readers)] for reader in range(readers)]
    assert sorted(name for share in shares for name in share) == ALL
    resumed = files(readers - 1, readers)
    first = next(iter(resumed))
    again = files(readers - 1, readers)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert [first["id"], *(document["id"] for document in again)] == shares[-1]


def test_a_sample_of_a_tar_file_has_its_files_by_ending(tmp_path: Path) -> None:
    write_tars(tmp_path)
    sample = next(iter(webdataset(str(tmp_path))(0, 3)))
    assert sample == {
        "__key__": f"images/{LONG}0-0",
        "json": json.dumps(lines_of(0)[0]).encode(),
        "seg.png": b"\x00" * 700,
    }


def add_file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_tar_files_are_read_as_by_webdataset(tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset", reason="webdataset is not installed")
    names = ["a/1.JPG", "a/1.seg.png", "README", "a.b/2.x", "__index__/3.y", "a/1.cls", "4.tar.gz", "4.x"]
    with tarfile.open(tmp_path / "part.tar", "w") as archive:
        for number, name in enumerate(names):
            add_file(archive, name, bytes([number]) * 600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shards = library.WebDataset(str(tmp_path / "part.tar"), shardshuffle=False)
        expected = [{key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")}
                    for sample in shards]  # fmt: skip
    assert [sample["__key__"] for sample in expected] == ["a/1", "a.b/2", "a/1", "4"]
    assert list(webdataset(str(tmp_path))(0, 1)) == expected


def test_two_files_of_one_name_in_a_sample_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "part.tar", "w") as archive:
        for name in ("1.jpg", "1.JPG"):
            add_file(archive, name, b"")
    with pytest.raises(UsageError, match=r"part\.tar cannot be read from byte 0 on: it has two files '1\.JPG'"):
        list(webdataset(str(tmp_path))(0, 1))


def test_the_fingerprint_is_that_of_names_and_sizes(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    before = elastic.data.stream(jsonl(str(tmp_path))).facts
    assert before == elastic.data.stream(jsonl(str(tmp_path))).facts
    assert "3 files of" in dict(before)["streamed files"]
    (tmp_path / "part-3.jsonl").write_text("{}\n")
    assert before != elastic.data.stream(jsonl(str(tmp_path))).facts


def test_fewer_files_than_readers_are_refused_with_their_number(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    with pytest.raises(UsageError, match=r"3 files below .* cannot be shared between 4 readers .*striped=True"):
        elastic.data.stream(jsonl(str(tmp_path))).check(4)
    elastic.data.stream(jsonl(str(tmp_path), striped=True)).check(4)


def test_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x\n")
    with pytest.raises(UsageError, match=r"of 1 files below .*, none matches the pattern '\*.jsonl\*'"):
        elastic.data.stream(jsonl(str(tmp_path)))
    with pytest.raises(UsageError, match="give the folder"):
        elastic.data.stream(text(str(tmp_path / "other.txt")))


@pytest.mark.parametrize("content", ['{"a": 1}\n{"a": \n', '{"a": 1}\n\xff\n'])
def test_a_broken_line_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=r"a.jsonl cannot be read from byte 9 on"):
        list(jsonl(str(tmp_path))(0, 1))


def test_a_cut_tar_file_is_named(tmp_path: Path) -> None:
    write_tars(tmp_path)
    whole = (tmp_path / "part-0.tar").read_bytes()
    (tmp_path / "part-0.tar").write_bytes(whole[:2000])
    with pytest.raises(UsageError, match=r"part-0.tar cannot be read from byte"):
        list(webdataset(str(tmp_path))(0, 3))


def test_an_object_that_ends_early_is_not_taken_for_its_end(tmp_path: Path) -> None:
    write_text(tmp_path)
    reading = text(str(tmp_path))(0, 3)
    assert isinstance(reading, FileDocuments)
    (tmp_path / "part-0.txt").write_text("0-0\n")
    with pytest.raises(Exception, match=r"part-0.txt"):
        list(reading)
