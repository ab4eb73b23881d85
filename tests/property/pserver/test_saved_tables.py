"""Any table that could have been saved is read back exactly, and keeps its rows whatever the number of shards."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError

RULES = ("sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared")
floats = st.floats(width=32, allow_nan=False).map(lambda x: f"{x:.6g}")


@st.composite
def tables(draw):
    config = TableConfig(
        width=draw(st.integers(1, 4)), optimizer={"rule": draw(st.sampled_from(RULES))}, admission_threshold=2
    )
    num_first, num_embedding = saved_tables.state_widths(config)
    keys = draw(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=40))
    lines = {}
    for key in keys:
        width = 6 + num_first + (config.width + num_embedding) * draw(st.booleans())
        lines[key] = [draw(floats) for _ in range(width)]
    return config, lines


def write(directory, config, lines, num_shards):
    folder = directory / f"{table_id('t'):03d}"
    folder.mkdir(parents=True)
    for shard in range(num_shards):
        rows = [f"{key} {' '.join(values)}\n" for key, values in lines.items() if key % num_shards == shard]
        (folder / f"part-000-{shard:05d}").write_text("".join(rows))
    return saved_tables.record(directory, "t", config, 3, num_shards)


@given(table=tables(), num_shards=st.integers(1, 5), block_bytes=st.sampled_from([7, 100, 1 << 20]))
def test_read_back(tmp_path_factory, table, num_shards, block_bytes):
    config, lines = table
    saved = write(tmp_path_factory.mktemp("table"), config, lines, num_shards)
    assert saved.num_rows == len(lines)
    assert saved_tables.open_table(saved.directory) == saved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tables, "_BLOCK_BYTES", block_bytes)
        found = {}
        for rows in saved_tables.read_rows(saved):
            for i, key in enumerate(rows.keys_N.tolist()):
                fixed = [0, rows.unseen_days_N[i], rows.delta_score_N[i], rows.shows_N[i], rows.clicks_N[i]]
                found[key] = [*fixed, rows.first_order_N[i], *rows.first_order_state_NA[i]]
                if rows.has_embedding_N[i]:
                    found[key] += [*rows.embedding_NK[i], *rows.embedding_state_NE[i]]
                else:
                    assert not rows.embedding_NK[i].any()
    assert found.keys() == lines.keys()
    for key, values in lines.items():
        np.testing.assert_array_equal(np.array(found[key][1:], np.float32), np.array(values[1:], np.float32))


@given(table=tables(), before=st.integers(1, 5), after=st.integers(1, 9), open_files=st.sampled_from([1, 3, 200]))
def test_reshard_keeps_every_row_in_its_place(tmp_path_factory, table, before, after, open_files):
    config, lines = table
    base = tmp_path_factory.mktemp("table")
    saved = write(base / "a", config, lines, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tables, "_MAX_OPEN_FILES", open_files)
        copy = saved_tables.reshard(saved, base / "b", after)
    assert len(copy.parts) == after
    assert copy.config == config
    seen = {}
    for shard, path in enumerate(copy.paths()):
        for line in path.read_text().splitlines():
            key, *values = line.split(" ")
            assert int(key) % after == shard
            seen[int(key)] = values
    assert seen == lines
    saved_tables.verify(saved_tables.open_table(base / "b"))
    with pytest.raises(CheckpointError, match="exists"):
        saved_tables.reshard(saved, base / "b", after)


@given(junk=st.text(string.printable, min_size=1, max_size=30))
def test_junk_is_an_error_not_rows(tmp_path_factory, junk):
    config = TableConfig(width=2, optimizer={"rule": "sgd"})
    directory = tmp_path_factory.mktemp("table")
    folder = directory / f"{table_id('t'):03d}"
    folder.mkdir()
    line = "7 0 0 0 1 0 0.5 0.25 0.125\n"
    (folder / "part-000-00000").write_bytes((line + junk.replace("\n", "") + "\n" + line.replace("7", "8", 1)).encode())
    saved = saved_tables.record(directory, "t", config, 3, 1)
    try:
        keys = [key for rows in saved_tables.read_rows(saved) for key in rows.keys_N.tolist()]
    except CheckpointError:
        return
    assert len(keys) == 3  # the junk was a number of numbers
