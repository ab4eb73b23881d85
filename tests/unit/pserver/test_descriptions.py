"""What a saved table says of itself may come from anybody: it is checked before any of it becomes a path."""

import errno
import json
import os

import pytest

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError, LoadError


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "t" / f"{table_id('t'):03d}"
    folder.mkdir(parents=True)
    for shard in range(2):
        (folder / f"part-000-{shard:05d}").write_text(f"{shard + 2} 0 1 0 1 0 0.5 1 0.25 0.25 1\n")
    return saved_tables.record(tmp_path / "t", "t", TableConfig(width=2), 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../x/part-000-00000"},
        {"name": "/tmp/x"},
        {"name": "part-000-00000/../x"},
        {"name": "part-000-\u0661\u0661\u0661\u0661\u0661"},
        {"num_bytes": "7"},
        {"num_rows": -1},
        {"num_rows": None},
        {"more": 1},
    ],
)
def test_a_description_whose_parts_are_not_ours_is_refused(saved, change):
    document = json.loads((saved.directory / "table.json").read_text())
    del document["checksum"]
    document["parts"][0] |= change
    document["checksum"] = saved_tables._checksum(document)
    with pytest.raises(CheckpointError):
        saved_tables.parse_description(json.dumps(document), saved.directory)


@pytest.mark.parametrize("change", [{"name": "../x"}, {"name": 7}, {"config": []}, {"parts": 7}, {"seed": "x"}])
def test_a_description_that_is_not_ours_is_refused(saved, change):
    document = {**json.loads((saved.directory / "table.json").read_text()), **change}
    del document["checksum"]
    document["checksum"] = saved_tables._checksum(document)
    for text in (json.dumps(document), "[" * 100_000, "[]", "7"):
        with pytest.raises(CheckpointError):
            saved_tables.parse_description(text, saved.directory)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EMFILE, LoadError), (errno.ESTALE, LoadError), (errno.EACCES, CheckpointError)]
)
def test_a_read_error_that_may_pass_is_not_called_damage(saved, monkeypatch, number, kind):
    real = os.open

    def fail(path, *arguments, **named):
        if str(path).startswith(str(saved.directory)):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(kind, match="cannot be read"):
        saved_tables.open_table(saved.directory)


def test_a_pipe_in_a_parts_place_is_not_waited_for(saved):
    part = saved.paths()[0]
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(CheckpointError, match="are missing"):
        saved_tables.open_table(saved.directory)
