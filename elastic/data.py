"""Streamed training data, and a local order for map-style data: docs/data.md."""

from __future__ import annotations

from elastic.training.data.blocks import in_blocks
from elastic.training.data.stream.files import jsonl, text, webdataset
from elastic.training.data.stream.foreign import hugging_face
from elastic.training.data.stream.pipeline import Pack
from elastic.training.data.stream.spec import Stream, mix, stream

__all__ = ["Pack", "Stream", "hugging_face", "in_blocks", "jsonl", "mix", "stream", "text", "webdataset"]
