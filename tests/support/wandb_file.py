"""Reads the file of an offline W&B run, with the messages of the real package.

The file is a log of LevelDB: after a header of 7 bytes, blocks of 32 KiB; in them chunks of checksum (4 bytes), length
(2), type (1: whole, 2: first, 3: middle, 4: last) and content. The content of whole chunks, or of a first to a last one
joined, is a protobuf `Record`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER, BLOCK, CHUNK = 7, 32 * 1024, 7
WHOLE, LAST = 1, 4


@dataclass(slots=True)
class OfflineRun:
    """What W&B would be sent."""

    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row for each logged step."""
    axes: dict[str, str] = field(default_factory=dict)
    """Pattern of a metric -> what it is counted by."""
    exit_code: int | None = None
    """None: the run never ended."""


def contents(data: bytes) -> Iterator[bytes]:
    """The content of every record of the log."""
    offset, parts = HEADER, b""
    while offset + CHUNK <= len(data):
        left = BLOCK - offset % BLOCK
        if left < CHUNK:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + CHUNK : offset + CHUNK + length]
        offset += CHUNK + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def read_offline_run(folder: Path) -> OfflineRun:
    """The one offline run below `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run = OfflineRun()
    for content in contents(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "metric":
            name = record.metric.name or record.metric.glob_name
            run.axes[name] = record.metric.step_metric
        elif kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            run.history.append(row)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run
