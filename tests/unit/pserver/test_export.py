import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from paddlewheel.pserver import export, saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import codebook
from paddlewheel.pserver.lookup import Lookup

WIDTH, SEED = 5, 9


def make_saved(directory, config, num_keys, num_shards=3):
    """(saved table, keys, first-order weights, changes, who has an embedding)"""
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(1, 1 << 64, num_keys, dtype=np.uint64))
    first = rng.normal(size=len(keys)).astype(np.float32).round(4)
    change = rng.normal(size=(len(keys), WIDTH)).astype(np.float32).round(4)
    has = np.arange(len(keys)) % 7 >= (config.admission_threshold or 0)  # its shows, below
    folder = directory / f"{table_id('t'):03d}"
    folder.mkdir(parents=True)
    for shard in range(num_shards):
        with (folder / f"part-000-{shard:05d}").open("w") as file:
            for i in np.flatnonzero(keys % np.uint64(num_shards) == shard):
                values = [f"{first[i]:.6g}", "0.5"]
                if has[i]:
                    values += [*(f"{x:.6g}" for x in change[i]), "0.25"]
                file.write(f"{keys[i]} 0 0 1 {i % 7} {i % 2} {' '.join(values)}\n")
    return saved_tables.record(directory, "t", config, SEED, num_shards), keys, first, change, has


@pytest.fixture(params=[None, 4], ids=["all", "admitted"])
def case(request, tmp_path):
    return make_saved(
        tmp_path / "saved", TableConfig(width=WIDTH, initial_range=0.5, admission_threshold=request.param), 1000
    )


def expected_values(keys, first, change, has):
    initial = codebook("t", WIDTH, 0.5, SEED)[(keys & np.uint64(0xFFFF)).astype(int)]
    return np.column_stack([first, (initial + change) * has[:, None]])


def test_an_export_holds_effective_values(case, tmp_path):
    saved, keys, first, change, has = case
    done = export.export_table(saved, tmp_path / "out")
    assert (done.num_rows, done.num_embeddings) == (len(keys), has.sum())
    table = pq.read_table(done.paths[0])
    assert table.column_names == ["key", "first_order", "embedding", "shows", "clicks"]
    order = np.argsort(table["key"].to_numpy())
    np.testing.assert_array_equal(table["key"].to_numpy()[order], keys)
    np.testing.assert_array_equal(table["shows"].to_numpy()[order], np.arange(len(keys)) % 7)
    embeddings = table["embedding"].to_pylist()
    assert [embeddings[i] is not None for i in order] == has.tolist()  # no embedding is null, not zeros
    values = np.concatenate([v for _, v in export.read_export(tmp_path / "out")])[order]
    np.testing.assert_allclose(values, expected_values(keys, first, change, has), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_columns_are_of_types_that_every_supported_pyarrow_reads(case, tmp_path, dtype):
    """No fixed-size list: with nulls, pyarrow before 26 writes some of them and reads none."""
    done = export.export_table(case[0], tmp_path / "out", dtype=dtype)
    table = pq.read_table(done.paths[0])
    assert pa.types.is_list(table.schema.field("embedding").type)
    assert set(pc.list_value_length(table["embedding"]).drop_null().to_pylist()) == {WIDTH}


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 26, reason="pyarrow before 26 cannot read such a file")
def test_a_fixed_size_list_of_an_earlier_version_is_read(case, tmp_path):
    done = export.export_table(case[0], tmp_path / "out")
    expected = list(export.read_export(tmp_path / "out"))
    table = pq.read_table(done.paths[0])
    at = table.schema.get_field_index("embedding")
    column = table["embedding"].combine_chunks()
    fixed = pa.array(column.to_pylist(), pa.list_(pa.float32(), WIDTH))
    pq.write_table(table.set_column(at, "embedding", fixed), done.paths[0])
    assert pa.types.is_fixed_size_list(pq.read_schema(done.paths[0]).field("embedding").type)
    for (keys, values), (known_keys, known) in zip(export.read_export(tmp_path / "out"), expected, strict=True):
        np.testing.assert_array_equal(keys, known_keys)
        np.testing.assert_array_equal(values, known)
    about = export.about_export(tmp_path / "out")
    again = tmp_path / "again"
    again.mkdir()
    with export.Writer(again, about) as writer:
        for group in export.read_groups(tmp_path / "out"):
            writer.write_table(group)
        writer.finish()
    for (_, values), (_, known) in zip(export.read_export(again), expected, strict=True):
        np.testing.assert_array_equal(values, known)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2), ("int8", 2e-2)])
def test_smaller_types_lose_what_they_must(case, tmp_path, dtype, tolerance):
    saved, keys, first, change, has = case
    full = export.export_table(saved, tmp_path / "full")
    small = export.export_table(saved, tmp_path / "small", dtype=dtype)
    assert small.num_bytes < full.num_bytes
    found = list(export.read_export(tmp_path / "small"))
    order = np.argsort(np.concatenate([k for k, _ in found]))
    values = np.concatenate([v for _, v in found])[order]
    expected = expected_values(keys, first, change, has)
    np.testing.assert_array_equal(values[:, 0], first)
    assert 0 < np.abs(values - expected).max() < tolerance * 2
    np.testing.assert_array_equal(values[~has, 1:], 0)


def test_a_table_without_first_order_weights(tmp_path):
    saved, _, _, change, _ = make_saved(
        tmp_path / "saved", TableConfig(width=WIDTH, first_order=False, initial_range=0.0), 200
    )
    export.export_table(saved, tmp_path / "out")
    ((found, values),) = export.read_export(tmp_path / "out")
    np.testing.assert_allclose(values[np.argsort(found)], change, rtol=1e-6)
    assert "first_order" not in pq.read_schema(tmp_path / "out" / "export-00000.parquet").names


def test_many_small_groups_and_files(tmp_path, monkeypatch):
    saved, keys, first, change, has = make_saved(tmp_path / "saved", TableConfig(width=WIDTH, initial_range=0.5), 1000)
    monkeypatch.setattr(saved_tables, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(export, "_ROWS_PER_GROUP", 50)
    monkeypatch.setattr(export, "_ROWS_PER_FILE", 300)
    done = export.export_table(saved, tmp_path / "out")
    assert len(done.paths) > 2
    found = list(export.read_export(tmp_path / "out"))
    assert max(len(k) for k, _ in found) < 120
    order = np.argsort(np.concatenate([k for k, _ in found]))
    expected = expected_values(keys, first, change, has)
    np.testing.assert_allclose(np.concatenate([v for _, v in found])[order], expected, rtol=1e-6, atol=1e-6)


def test_an_empty_table(tmp_path):
    saved, *_ = make_saved(tmp_path / "saved", TableConfig(width=WIDTH), 0)
    done = export.export_table(saved, tmp_path / "out")
    assert (done.num_rows, list(export.read_export(tmp_path / "out"))) == (0, [])
    lookup = Lookup.build({"t": tmp_path / "out"}, tmp_path / "lookup")
    assert lookup.pull("t", np.array([5], np.uint64)).shape == (1, 1 + WIDTH)


def test_a_damaged_table_leaves_no_export(case, tmp_path):
    saved, *_ = case
    path = saved.paths()[1]
    path.write_text(path.read_text().replace(" ", "  ", 1))
    with pytest.raises(CheckpointError, match=path.name):
        export.export_table(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="not an exported table"):
        list(export.read_export(tmp_path / "out"))


def test_a_lookup_pulls_like_a_client(case, tmp_path):
    saved, keys, first, change, has = case
    export.export_table(saved, tmp_path / "out")
    Lookup.build({"t": tmp_path / "out"}, tmp_path / "lookup")
    lookup = Lookup.open(tmp_path / "lookup")
    rng = np.random.default_rng(1)
    unknown = rng.integers(1, 1 << 64, 50, dtype=np.uint64)
    some = rng.permutation(np.concatenate([keys[::3], unknown]))
    values = lookup.pull("t", some)
    expected = dict(zip(keys.tolist(), expected_values(keys, first, change, has), strict=True))
    book = codebook("t", WIDTH, 0.5, SEED)
    for key, row in zip(some.tolist(), values, strict=True):
        if key in expected:
            np.testing.assert_allclose(row, expected[key], rtol=1e-6, atol=1e-6)
        elif saved.config.admission_threshold:
            np.testing.assert_array_equal(row, 0)
        else:
            np.testing.assert_array_equal(row, [0, *book[key & 0xFFFF]])
    with pytest.raises(CheckpointError, match="not a lookup"):
        Lookup.open(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="exists"):
        Lookup.build({"t": tmp_path / "out"}, tmp_path / "lookup")
