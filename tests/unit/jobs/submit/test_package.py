"""What a folder sends: git's own verdict is the oracle for what is ignored."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from elastic_jobs.submit.package import (
    Package,
    PackedFile,
    check_entry_point,
    check_package,
    largest_entries,
    list_package,
    write_archive,
)

from elastic.core.errors import UsageError

# name -> the lines of .gitignore files in folders of the tree below.
_RULES = {
    "plain": {"": ["*.log", "build/", "/only_here", "# a comment", "", "data/*.bin"]},
    "negated": {"": ["*.log", "!keep.log", "/data/*", "!/data/small"]},
    "nested": {"": ["*.log", "secret*"], "pkg": ["!b.log", "/deep/"], "pkg/deep": ["!*"]},
    "stars": {"": ["**/deep", "pkg/**/x.py", "a?b", "[a-c].txt", "[!a-c]z.txt", "data/**"]},
    "odd": {
        "": ["\\#hash", "\\!bang", "trailing\\ ", "space   ", "/", "*/x.py", "build"],
        "data": ["*", "!.gitignore"],
    },
    "pruned": {"": ["data", "!data/small/in.txt"]},
}
_FILES = [
    "a.log", "keep.log", "only_here", "pkg/only_here", "build/out.o", "pkg/build/out.o", "pkg/__init__.py", "pkg/b.log",
    "pkg/deep/x.py", "pkg/deep/y.log", "pkg/deep/er/x.py", "pkg/x.py", "secret.txt", "pkg/secrets", "data/large.bin",
    "data/small/in.txt", "data/top.txt", "a-b", "a.txt", "dz.txt", "az.txt", "#hash", "!bang", "trailing ", "space",
    "x.py",
]  # fmt: skip


def tree(root: Path, rules: dict[str, list[str]]) -> Path:
    for file in _FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(file)
    for folder, lines in rules.items():
        (root / folder / ".gitignore").write_text("".join(f"{line}\n" for line in lines))
    return root


def git_says(root: Path, inside: str = ".") -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", inside]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted(path for path in listed if path)


@pytest.mark.parametrize("name", _RULES)
def test_what_git_ignores_is_not_sent(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path, _RULES[name])
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert sorted(file.path for file in list_package(root).files) == git_says(root)


@pytest.mark.parametrize("name", _RULES)
def test_rules_above_the_folder_count_up_to_the_top_of_the_repository(tmp_path: Path, name: str) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    root = tree(tmp_path / "repository", _RULES[name])
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    found = sorted(f"pkg/{file.path}" for file in list_package(root / "pkg").files)
    assert found == git_says(root, "pkg")


def test_histories_caches_and_what_is_excluded_are_not_sent(tmp_path: Path) -> None:
    for file in (".git/config", ".venv/lib/x.py", "pkg/__pycache__/x.pyc", "big/x.bin", "big/keep.py", "train.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / ".rayignore").write_text("*.bin\n")
    assert [file.path for file in list_package(tmp_path).files] == [".rayignore", "big/keep.py", "train.py"]
    assert [file.path for file in list_package(tmp_path, ["big/"]).files] == [".rayignore", "train.py"]


def test_links_inside_are_sent_as_files_and_all_others_are_left_out_and_told(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "id_rsa").write_text("secret")
    (root / "data.txt").write_text("data")
    (root / "sub" / "file").symlink_to("../data.txt")
    (root / "secret").symlink_to(outside / "id_rsa")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "round").symlink_to("round")
    (root / "nowhere").symlink_to(tmp_path / "gone")
    package = list_package(root)
    assert package.files == (PackedFile("data.txt", 4), PackedFile("sub/file", 4))
    assert package.left_out == ("folder", "loop", "nowhere", "round", "secret")


def test_the_same_content_gives_the_same_archive(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        root = tmp_path / name
        root.mkdir()
        for file in ("b.py", "a.py") if name == "one" else ("a.py", "b.py"):
            (root / file).write_text(file)
        write_archive(list_package(root), tmp_path / f"{name}.zip")
        made.append((tmp_path / f"{name}.zip").read_bytes())
    assert made[0] == made[1]


def test_a_package_over_the_limit_is_refused_with_its_largest_entries(tmp_path: Path) -> None:
    files = [PackedFile("data/deep/train.bin", 900), PackedFile("data/readme", 10), PackedFile("a.py", 5)]
    files += [PackedFile(f"logs/{n}.txt", 20) for n in range(10)] + [PackedFile("b.py", 4)]
    assert largest_entries(files) == [("data/deep/train.bin", 900), ("logs/", 200), ("a.py", 5)]
    package = Package(tmp_path, tuple(files))
    check_package(package, 1119)
    with pytest.raises(UsageError) as refused:
        check_package(package, 1118)
    told = str(refused.value)
    assert "1.1 kB in 14 files" in told
    assert "the limit of 1.1 kB" in told
    assert "data/deep/train.bin (900 B), logs/ (200 B), a.py (5 B)" in told


def test_what_would_hide_our_own_packages_is_refused(tmp_path: Path) -> None:
    for own in ("elastic.py", "elastic_jobs/mine.py", "elastic_cluster/__init__.py"):
        with pytest.raises(UsageError, match=f"'{own.partition('/')[0].removesuffix('.py')}', which would hide"):
            check_package(Package(tmp_path, (PackedFile(own, 1),)), 100)
    # Names that ray-elastic does not install.
    names = ("jobs.py", "cluster.py", "utils.py", "elastic_test.py", "jobs/mine.py", "cluster/mine.py")
    check_package(Package(tmp_path, tuple(PackedFile(name, 1) for name in names)), 100)
    ours = ("jobs/elastic_jobs/cli.py", "elastic/runtime/controller/actor.py")
    check_package(Package(tmp_path, tuple(PackedFile(path, 1) for path in ours)), 100)
    with pytest.raises(UsageError, match="has no files to send"):
        check_package(Package(tmp_path, ()), 100)


@pytest.mark.parametrize(
    ("folder", "text", "refused"),
    [
        (".", "train.py:main", None),
        (".", "pkg.model:Model.train", None),
        (".", "pkg:made", None),
        ("pkg", "model.py:Model", None),
        ("pkg", "../train.py:main", None),
        (".", "train.py:other", "train.py has no 'other'"),
        (".", "os:system", "there is no module 'os'"),
        (".", "../outside.py:main", "there is no file ../outside.py"),
        (".", "ignored.py:main", "there is no file ignored.py"),
        (".", "broken.py:main", "does not import"),
        (".", "star.py:anything", None),
    ],
)
def test_entry_points_come_from_the_package(tmp_path: Path, folder: str, text: str, refused: str | None) -> None:
    sources = {
        "train.py": "def main(config): ...\n", "pkg/__init__.py": "made = lambda: 0\n", "star.py": "from os import *\n",
        "pkg/model.py": "class Model: ...\n", "broken.py": "def main(:\n", "ignored.py": "def main(): ...\n",
        ".gitignore": "ignored.py\n",
    }  # fmt: skip
    root = tmp_path / "root"
    for file, source in sources.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(source)
    (tmp_path / "outside.py").write_text("def main(): ...\n")
    package = list_package(root)
    if refused is None:
        check_entry_point(package, folder, text)
    else:
        with pytest.raises(UsageError, match=refused):
            check_entry_point(package, folder, text)
