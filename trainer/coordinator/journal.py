"""The journal of a run: what its coordinators decided, one sealed record a line (`run_dir/journal.jsonl`).

It only grows, outlives the coordinator, and is what the report proves from. So each record carries a number, by which a
lost one is missed, and a checksum of its line. A line that does not fit its checksum is never taken for a record: not
by the report, and not by the next coordinator, which puts it aside; where a run begins, the checkpoints decide.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paddlewheel.trainer.coordinator.records import RECORDS, Record

_SEALED = re.compile(rb'(\{.*), "crc": "([0-9a-f]{8})"\}')
_DAMAGED_SUFFIX = ".damaged"


@dataclass(frozen=True)
class Content:
    """What a journal holds.

    Attributes:
        records: those that are whole, oldest first, each with its number (`record`).
        damaged: lines (counted from 1) that are no records: changed, or cut short by a crash or a full disk.
        missing: numbers of records that are not there, or are on a damaged line.
    """

    records: tuple[Record, ...] = ()
    damaged: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


def seal(record: Mapping[str, Any]) -> bytes:
    """The line of a record (as plain data), without its end."""
    body = json.dumps(record).encode()
    return body[:-1] + b', "crc": "%08x"}' % zlib.crc32(body)


def read(path: Path) -> Content:
    """Everything that is whole; nothing if there is no journal."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return Content()
    records: list[Record] = []
    damaged = []
    for place, line in enumerate(lines, 1):
        record = _opened(line)
        if record is not None:
            records.append(record)
        elif line:
            damaged.append(place)
    numbers = {record.record for record in records}
    missing = sorted(set(range(1, max(numbers, default=0))) - numbers)
    return Content(tuple(records), tuple(damaged), tuple(missing))


def _opened(line: bytes) -> Record | None:
    """None: it is no record, whatever its checksum says; so readers can rely on every field."""
    found = _SEALED.fullmatch(line)
    if found is None or zlib.crc32(found[1] + b"}") != int(found[2], 16):
        return None
    with contextlib.suppress(ValidationError):
        record = RECORDS.validate_json(found[1] + b"}")
        return record if record.record > 0 else None
    return None


def put_damaged_aside(path: Path) -> str | None:
    """Leaves only whole records in the journal, and appends the other lines to `journal.jsonl.damaged` beside it.

    Returns what a person should know; None if there was nothing to do.
    """
    content = read(path)
    if not content.damaged:
        return None
    lines = path.read_bytes().split(b"\n")
    aside = path.with_name(path.name + _DAMAGED_SUFFIX)
    with aside.open("ab") as file:
        file.writelines(lines[place - 1] + b"\n" for place in content.damaged)
    whole = path.with_name(path.name + ".new")
    kept = [line for place, line in enumerate(lines, 1) if line and place not in content.damaged]
    with whole.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    whole.replace(path)
    places = ", ".join(map(str, content.damaged[:5])) + (", ..." if len(content.damaged) > 5 else "")
    return (
        f"{path}: line {places} is no record (damaged, or cut short by a crash or a full disk) and was moved to"
        f" {aside.name}; where training goes on, the checkpoints decide"
    )


class Journal:
    """A journal that is being written. Safe from any thread.

    Args:
        path: of the file; what is there is gone on from.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        content = read(path)
        last = content.records[-1].record if content.records else 0
        self._number = last + len(content.damaged)  # a damaged line may have been the newest record
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._fd).st_size
        # A line was cut short, by a full disk or the end of the process that wrote it.
        self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"

    def write(self, record: Record) -> None:
        """Adds a line, with the time unless it has one, and makes it durable. Raises OSError when that fails."""
        with self._lock:
            self._number += 1
            stamped = {"record": self._number, "time": record.time or round(time.time(), 3)}
            line = seal({**record.model_dump(), **stamped}) + b"\n"
            if self._torn:
                line = b"\n" + line
            self._torn = True
            rest = memoryview(line)
            while rest:
                written = os.write(self._fd, rest)
                self._size += written
                rest = rest[written:]
            self._torn = False
            os.fsync(self._fd)

    def check(self) -> str | None:
        """What has been done to the file behind this one's back, once; what follows is written to a file again."""
        with self._lock:
            try:
                there = self._path.stat()
            except FileNotFoundError:
                there = None
            own = os.fstat(self._fd)
            if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
                os.close(self._fd)
                self._open()
                done = "removed" if there is None else "replaced"
            elif own.st_size < self._size:
                self._size = own.st_size
                self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"
                done = "cut"
            else:
                return None
        return (
            f"{self._path} was {done} while the job runs: training is not affected, but the report may not be able to"
            " prove any more that each row was trained once"
        )

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
