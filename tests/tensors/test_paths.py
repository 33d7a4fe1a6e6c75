"""Whatever a user or a stored file names, nothing outside the storage is touched; and nothing in it is unpickled."""

from __future__ import annotations

import ast
import json
import posixpath
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_jobs.run_folder import RunFolder
from hypothesis import example, given
from hypothesis import strategies as st
from storage_contract import save

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.checkpoint.manifest_json import _check, _compact, from_json, to_json
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.names import check_file, check_path, check_run_id, parse_checkpoint_id
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.open_segments import open_segments
from elastic.runtime.worker.logs import log_file
from elastic.store.objects import Objects
from elastic.store.open import open_objects

ROOT = Path(__file__).resolve().parents[2]
# Texts that are likelier to do harm than random ones.
NASTY = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from("./\\~a-_0:?*\0\n \u2024\u2215"), max_size=12),
    st.lists(st.sampled_from(["..", ".", "", "run", "~", "/etc", "C:", "a" * 300]), max_size=5).map("/".join),
)


def stays_below(text: str) -> bool:
    """Whether a name, joined to a folder, is one name directly in it."""
    joined = posixpath.normpath(posixpath.join("/storage", text))
    return posixpath.dirname(joined) == "/storage" and "\\" not in text and "\0" not in text and text.isprintable()


@given(text=NASTY)
@example("..")
@example("a/../../b")
@example("run\n")
def test_whatever_is_taken_as_a_name_is_one(text: str) -> None:
    checks: list[Callable[[str], object]] = [check_run_id, check_file, parse_checkpoint_id]
    for check in checks:
        try:
            check(text)
        except (UsageError, IntegrityError):
            continue
        assert stays_below(text), (check, text)


@given(text=NASTY)
@example("a/../..")
@example("/etc/passwd")
def test_no_path_leads_out(text: str) -> None:
    try:
        check_path(text)
    except IntegrityError:
        return
    joined = posixpath.normpath(posixpath.join("/storage", text))
    assert joined == "/storage" or joined.startswith("/storage/")


@pytest.mark.parametrize("url", ["path", "memory"])
@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "./a", "a\\..\\b"])
def test_storage_refuses_paths_that_lead_out(tmp_path: Path, url: str, path: str) -> None:
    objects = open_objects(str(tmp_path / "top") if url == "path" else f"memory://{uuid.uuid4().hex}/top")
    (tmp_path / "secret").write_text("not yours")
    calls: list[Callable[[], object]] = [
        lambda: objects.get(path),
        lambda: objects.put(path, [b"x"]),
        lambda: objects.create(path, b"x"),
        lambda: objects.read_into(path, 0, [memoryview(bytearray(1))]),
        lambda: objects.sizes(path),
        lambda: objects.names(path),
        lambda: objects.remove([path]),
    ]
    for call in calls:
        with pytest.raises(IntegrityError, match="not a path below the storage"):
            call()
    assert (tmp_path / "secret").read_text() == "not yours"


@pytest.mark.parametrize("where", ["file", "folder", "run"])
def test_symbolic_links_that_lead_out_are_not_followed(tmp_path: Path, where: str) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "x").write_text("not yours")
    (top / "run").mkdir(parents=True)
    objects = open_objects(str(top))
    if where == "file":
        (top / "run" / "x").symlink_to(outside / "x")
    elif where == "folder":
        (top / "run" / "sub").symlink_to(outside)
    else:
        (top / "run").rmdir()
        (top / "run").symlink_to(outside)
    path = "run/sub/x" if where == "folder" else "run/x"
    for call in (lambda: objects.get(path), lambda: objects.put(path, [b"y"]), lambda: objects.remove([path])):
        with pytest.raises(IntegrityError, match="leads out of the storage by a symbolic link"):
            call()
    assert (outside / "x").read_text() == "not yours"


@pytest.mark.parametrize("where", ["segment", "journal", "run"])
def test_the_journal_follows_no_link_out_of_the_storage(tmp_path: Path, where: str) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    (outside / "journal").mkdir(parents=True)
    victim = outside / "journal" / "000001.jsonl"
    victim.write_text("not yours\n")
    (top / "run" / "journal").mkdir(parents=True)
    if where == "segment":
        (top / "run" / "journal" / "000001.jsonl").symlink_to(victim)
    elif where == "journal":
        (top / "run" / "journal").rmdir()
        (top / "run" / "journal").symlink_to(outside / "journal")
    else:
        (top / "run" / "journal").rmdir()
        (top / "run").rmdir()
        (top / "run").symlink_to(outside)
    with pytest.raises(IntegrityError, match="leads out of the storage by a symbolic link"):
        list(open_segments(str(top), "run").lines(1))
    if where != "segment":
        for use in (lambda segments: segments.incarnations(), lambda segments: segments.claim(2)):
            with pytest.raises(IntegrityError, match="symbolic link"):
                use(open_segments(str(top), "run"))
    assert sorted(path.name for path in (outside / "journal").iterdir()) == ["000001.jsonl"]
    assert victim.read_text() == "not yours\n"


@pytest.mark.parametrize("where", ["file", "folder"])
def test_prints_are_not_written_through_a_link_out_of_the_storage(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    outside, run = tmp_path / "outside", tmp_path / "top" / "run"
    outside.mkdir()
    (run / "logs").mkdir(parents=True)
    if where == "file":
        (run / "logs" / "worker-0001.log").symlink_to(outside / "x")
    else:
        (run / "logs").rmdir()
        (run / "logs").symlink_to(outside)
    assert log_file(str(tmp_path / "top"), "run", 1) is None
    assert "symbolic link" in caplog.text
    (run / "background.log").symlink_to(outside / "y")
    with pytest.raises(IntegrityError, match="symbolic link"):
        RunFolder(str(tmp_path / "top"), "run").local_path("background.log")


def test_storage_may_itself_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "top").symlink_to(tmp_path / "disk")
    store = CheckpointStore(str(tmp_path / "top"), "run")
    assert store.verify_shards(save(store, 2))
    writer = JournalWriter(str(tmp_path / "top"), "run")
    assert writer.incarnation == 1


def with_file(objects: Objects, path: str, file: str) -> None:
    """The manifest as somebody would forge it: another shard file, and a check that fits."""
    body = json.loads(objects.get(path))["manifest"]
    body["shards"][0]["file"] = file
    text = _compact(body)
    objects.put(path, [f'{{"format":1,"check":"{_check(text)}","manifest":{text}}}'.encode()])


@given(file=NASTY)
@example("../../../../etc/passwd")
@example("/etc/passwd")
@example("..")
@example("manifest.json/..")
def test_a_manifest_cannot_name_a_file_elsewhere(file: str) -> None:
    objects = open_objects(f"memory://{uuid.uuid4().hex}")
    store = CheckpointStore("u", "run", objects=objects)
    manifest = save(store, 1)
    with_file(objects, f"run/checkpoints/{manifest.id}/manifest.json", file)
    try:
        found = store.manifest(manifest.id)
    except IntegrityError:
        return
    assert stays_below(found.shards[0].file)


def test_a_manifest_with_a_link_to_elsewhere_is_not_read(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "top"), "run")
    manifest = save(store, 1)
    shard = tmp_path / "top/run/checkpoints" / manifest.id / manifest.shards[0].file
    shard.rename(tmp_path / "moved")
    shard.symlink_to(tmp_path / "moved")
    with pytest.raises(IntegrityError, match="symbolic link"):
        store.verify_shards(manifest)


def test_a_manifest_is_read_back_as_it_was() -> None:
    """The forging above is of the true form: unchanged, it is taken."""
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}", "run")
    manifest = save(store, 1)
    assert from_json(to_json(manifest)) == manifest


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_strange_names_among_the_segments_are_left_alone(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path) if kind == "file" else f"memory://{uuid.uuid4().hex}"
    JournalWriter(url, "run").append({"type": "a"})
    objects = open_objects(url)
    for name in ("..jsonl", "000002.jsonl.bak", "\u0660\u0660\u0660\u0660\u0660\u0663", "x/000004.jsonl", "9" * 40):
        objects.put(f"run/journal/{name}", [b'{"seq":9,"type":"forged"}\n'])
    assert open_segments(url, "run").incarnations() == [1]
    assert [record["type"] for record in JournalReader(url, "run").records()] == ["begin", "a"]


@given(text=NASTY)
def test_a_journal_takes_any_bytes_for_damage_and_not_for_orders(text: str) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    open_objects(url).put("run/journal/000001/00000000.jsonl", [text.encode("utf-8", "surrogatepass")])
    reader = JournalReader(url, "run")
    assert reader.records() == []


# Who unpickles, and whose bytes they are.
UNPICKLES = {
    "elastic/training/in_loop/recording.py": "objects that the user's function asks of other ranks, sent by theirs",
    "elastic/runtime/train_function.py": "the user's function, sent by the driver through Ray",
}
_LOADERS = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}


def test_nothing_in_storage_is_unpickled() -> None:
    found = set()
    for package in ("elastic", "jobs", "cluster"):
        for file in (ROOT / package).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
                if unpickles(call):
                    found.add(file.relative_to(ROOT).as_posix())
    assert found == set(UNPICKLES)


def unpickles(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    module, _, method = name.rpartition(".")
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in ("torch.load", "torch.serialization.load"):
        return options.get("weights_only") != "True"
    if method == "load" and module in ("numpy", "np"):
        return options.get("allow_pickle", "False") != "False"
    return method in ("load", "loads", "Unpickler", "open") and module.rpartition(".")[2] in _LOADERS


@pytest.mark.parametrize(
    ("code", "bad"),
    [("pickle.loads(x)", True), ("torch.load(f)", True), ("torch.load(f, weights_only=False)", True),
     ("torch.load(f, weights_only=True)", False), ("np.load(f, allow_pickle=True)", True), ("json.loads(x)", False)],
)  # fmt: skip
def test_what_unpickling_looks_like(code: str, bad: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert unpickles(call) is bad
