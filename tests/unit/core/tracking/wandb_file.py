"""Reader of the files that Weights & Biases writes offline: a header of seven bytes, then records in LevelDB's log format."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_raw_records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    position, parts = HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            return
        part = data[position + HEADER : position + HEADER + length]
        if len(part) < length:
            return  # torn by a kill
        position += HEADER + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts


def read_records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for raw in read_raw_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        yield record


def make_key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def read_offline_run(folder: Path, is_finished: bool = True) -> dict[str, Any]:
    """Return id, project, rows, config, artifacts and exit code of the only offline run below a folder.

    Another process writes the file, and may still write after `finish()` has returned. So wait for the last record, unless
    `is_finished` is False.
    """
    (path,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + 60
    while is_finished and not any(record.WhichOneof("record_type") == "exit" for record in read_records(path)):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.05)
    told: dict[str, Any] = {"rows": [], "config": {}, "artifacts": [], "exit": None}
    for record in read_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told |= {"id": record.run.run_id, "project": record.run.project}
        elif kind == "history":
            told["rows"].append({make_key(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "artifact":
            told["artifacts"].append((record.artifact.type, record.artifact.name))
        elif kind == "exit":
            told["exit"] = record.exit.exit_code
        for update in [record.config] if kind == "config" else [record.run.config] if kind == "run" else []:
            told["config"] |= {make_key(item): json.loads(item.value_json) for item in update.update}
    return told
