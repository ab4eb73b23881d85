"""Base plus deltas is the full export, whatever changed; anything but the whole chain is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.pserver import export, saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.delta import apply_deltas, read_delta, write_delta
from paddlewheel.pserver.errors import CheckpointError

CONFIG = TableConfig(width=2, initial_range=0.25, admission_threshold=3, optimizer={"rule": "sgd"})
_names = itertools.count()


@st.composite
def states(draw):
    """A few saved states of one table: keys come, change, lose their embedding, go; counts decay in between."""
    decays = draw(st.lists(st.sampled_from([1.0, 0.5, 0.98]), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    state, history = {}, []
    for decay in [1.0, *decays]:
        state = {key: [shows * decay, clicks * decay, *rest] for key, (shows, clicks, *rest) in state.items()}
        for key in rng.integers(1, 2**64, rng.integers(0, 8), dtype=np.uint64).tolist():
            state[key] = [0, 0, 0, None]
        for key in list(state):
            chance = rng.random()
            if chance < 0.15:
                del state[key]
            elif chance < 0.5:
                shows, clicks, first, embedding = state[key]
                embedding = np.zeros(2) if embedding is None else embedding
                state[key] = [shows + 2, clicks + 1, first + rng.normal(), embedding + rng.normal(size=2)]
            elif chance < 0.55:
                state[key] = [*state[key][:3], None]
        history.append((decay, dict(state)))
    return history


def save(directory, state, num_shards):
    folder = directory / f"{table_id('t'):03d}"
    folder.mkdir(parents=True)
    for shard in range(num_shards):
        with (folder / f"part-000-{shard:05d}").open("w") as file:
            for key, (shows, clicks, first, embedding) in state.items():
                if key % num_shards == shard:
                    rest = "" if embedding is None else "".join(f" {x:.6g}" for x in embedding)
                    file.write(f"{key} 0 0 0 {shows:.6g} {clicks:.6g} {first:.6g}{rest}\n")
    return saved_tables.record(directory, "t", CONFIG, 3, num_shards)


def contents(directory):
    rows = {}
    for table in export.read_groups(directory):
        for row in table.to_pylist():
            assert row["key"] not in rows
            rows[row["key"]] = row
    return rows


@settings(max_examples=25)
@given(history=states(), dtype=st.sampled_from(["float32", "int8"]), shards=st.sampled_from([(2, 2), (2, 3)]))
def test_base_and_deltas_make_the_full_export(tmp_path_factory, history, dtype, shards):
    base = tmp_path_factory.mktemp("chain")
    saved = [save(base / f"s{i}", state, shards[i % 2]) for i, (_, state) in enumerate(history)]
    export.export_table(saved[0], base / "base", dtype=dtype)
    deltas = []
    for i, (before, after) in enumerate(itertools.pairwise(saved)):
        deltas.append(base / f"d{i}")
        made = write_delta(before, after, deltas[-1], dtype=dtype, count_decay=history[i + 1][0])
        assert read_delta(deltas[-1]) == made
        assert made.num_removed == len(history[i][1].keys() - history[i + 1][1].keys())
    done = apply_deltas(base / "base", deltas, base / "chained")
    full = export.export_table(saved[-1], base / "full", dtype=dtype)
    assert done.content_id == saved[-1].content_id
    assert done.exported.num_rows == full.num_rows
    assert done.exported.num_embeddings == full.num_embeddings
    assert export.about_export(base / "chained") == export.about_export(base / "full")
    chained, expected = contents(base / "chained"), contents(base / "full")
    assert chained.keys() == expected.keys()
    for key, row in expected.items():
        for count in ("shows", "clicks"):
            assert chained[key].pop(count) == pytest.approx(row.pop(count), rel=3e-5 * len(history))
    assert chained == expected
    if len(deltas) > 1 and len({table.content_id for table in saved}) == len(saved):
        for wrong in (deltas[1:], deltas[::-1], [deltas[0], *deltas], deltas[:1] * 2):
            with pytest.raises(CheckpointError, match="missing, twice, or out of order"):
                apply_deltas(base / "base", wrong, base / "wrong")
        assert not (base / "wrong").exists()


def test_a_delta_holds_only_what_changed(tmp_path):
    state = {key: [40, 1, 0.5, np.array([0.25, 0.5])] for key in range(1, 101)}
    state[5][0] = 4  # falls below the admission score of 3, and so loses its embedding
    before = save(tmp_path / "a", state, 2)
    state = {key: [shows * 0.5, clicks * 0.5, *rest] for key, (shows, clicks, *rest) in state.items() if key != 9}
    state[7] = [21, 1, 0.5, np.array([0.25, 0.75])]
    after = save(tmp_path / "b", state, 2)
    made = write_delta(before, after, tmp_path / "d", count_decay=0.5)
    assert (made.num_changed, made.num_removed) == (2, 1)


def test_other_tables_are_refused(tmp_path):
    one = save(tmp_path / "a", {5: [1, 0, 0.5, None]}, 1)
    other = saved_tables.SavedTable(one.directory, "u", one.config, one.seed, one.parts)
    with pytest.raises(CheckpointError, match="name is u"):
        write_delta(one, other, tmp_path / "d")
    with pytest.raises(CheckpointError, match="not a complete delta"):
        read_delta(tmp_path / "d")
    export.export_table(one, tmp_path / "base", dtype="float16")
    write_delta(one, one, tmp_path / "d")
    with pytest.raises(CheckpointError, match="dtype"):
        apply_deltas(tmp_path / "base", [tmp_path / "d"], tmp_path / "out")
