"""Reads what W&B wrote offline: a log of protobuf records in blocks, as LevelDB writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER = 7
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")  # checksum, length, kind
_PADDING, _WHOLE, _LAST = 0, 1, 4


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order; none before the run has ended.

    Offline, ``finish()`` returns before the last of them is on disk.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    rows, kind = [], None
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows if kind == "exit" else []


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _FILE_HEADER, b""
    while at + _CHUNK.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK.size:
            at += left
            continue
        _, length, kind = _CHUNK.unpack_from(data, at)
        if kind == _PADDING:
            return
        record += data[at + _CHUNK.size : at + _CHUNK.size + length]
        at += _CHUNK.size + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
