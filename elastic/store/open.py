"""Choosing the implementation of `Objects` for an address."""

from __future__ import annotations

from fsspec.implementations.local import LocalFileSystem

from elastic.store.address import file_system, is_s3
from elastic.store.local import LocalObjects
from elastic.store.objects import TIMEOUT_S, Objects
from elastic.store.remote import RemoteObjects
from elastic.store.s3 import S3Objects


def open_objects(url: str, timeout_s: float = TIMEOUT_S) -> Objects:
    """The objects below any fsspec URL or a plain local path. Sends no request yet.

    No request to remote storage takes longer than `timeout_s`, including retries.
    """
    fs, root = file_system(url)
    if isinstance(fs, LocalFileSystem):
        return LocalObjects(root)
    return S3Objects(fs, root, timeout_s) if is_s3(fs) else RemoteObjects(fs, root, timeout_s)
