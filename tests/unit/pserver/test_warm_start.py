import numpy as np
import pytest

from paddlewheel.pserver import export, saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import Initializer
from paddlewheel.pserver.warm_start import warm_start

RULES = ("sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared")


def config(rule="adam", **fields):
    return TableConfig(
        **{"width": 3, "initial_range": 0.5, "admission_threshold": 2, "optimizer": {"rule": rule}, **fields}
    )


def effective(saved):
    """Key to (effective values, shows, clicks, has embedding, state), all as tuples."""
    initializer = Initializer(saved.name, saved.config, saved.seed)
    found = {}
    for rows in saved_tables.read_rows(saved):
        values = export.effective(rows, saved.config, initializer)
        for i, key in enumerate(rows.keys_N.tolist()):
            state = (*rows.first_order_state_NA[i].tolist(), *rows.embedding_state_NE[i].tolist())
            found[key] = (values[i], rows.shows_N[i], rows.clicks_N[i], bool(rows.has_embedding_N[i]), state)
    return found


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    source = config()
    first, embedding = saved_tables.state_widths(source)
    folder = tmp_path / "old" / f"{table_id('old'):03d}"
    folder.mkdir(parents=True)
    for shard in range(2):
        lines = []
        for key in rng.integers(1, 1 << 62, 40, dtype=np.uint64).tolist():
            count = 1 + first + (3 + embedding) * (key % 9 >= 2)
            numbers = " ".join(f"{x:.6g}" for x in rng.random(count))
            lines.append(f"{key * 2 + shard} 0 1 0 {key % 9} {key % 2} {numbers}\n")
        (folder / f"part-000-{shard:05d}").write_text("".join(lines))
    return saved_tables.record(tmp_path / "old", "old", source, 1, 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("through", ["saved", "export"])
def test_another_name_seed_range_rule_and_number_of_shards(saved, tmp_path, rule, through):
    source = saved.directory
    if through == "export":
        source = tmp_path / "exported"
        export.export_table(saved, source)
    target = config(rule, initial_range=0.1, admission_threshold=2)
    made = warm_start(source, tmp_path / "new", name="new", config=target, seed=9, num_shards=5)
    assert saved_tables.open_table(tmp_path / "new") == made
    assert (made.name, made.seed, len(made.parts), made.num_rows) == ("new", 9, 5, saved.num_rows)
    for shard in range(5):
        keys = [rows.keys_N for rows in saved_tables.read_rows(made, shards=[shard])]
        assert all((each % np.uint64(5) == shard).all() for each in keys)
    before, after = effective(saved), effective(made)
    assert before.keys() == after.keys()
    for key, (values, *counts, state) in before.items():
        np.testing.assert_allclose(after[key][0], values, rtol=1e-6, atol=1e-6)
        assert list(after[key][1:4]) == counts
        if rule == "adam" and through == "saved":
            np.testing.assert_allclose(after[key][4], state, rtol=1e-6)
        elif rule.startswith("adam"):
            o = target.optimizer
            first = 4
            assert after[key][4][:first] == pytest.approx((0, 0, o.beta1, o.beta2))
            if after[key][3]:
                assert after[key][4][-2:] == pytest.approx((o.beta1, o.beta2))
        else:
            assert not any(after[key][4])


@pytest.mark.parametrize("change", [{"width": 4}, {"first_order": False}])
def test_another_shape_is_refused(saved, tmp_path, change):
    with pytest.raises(CheckpointError, match=f"has {next(iter(change))}"):
        warm_start(saved.directory, tmp_path / "new", name="n", config=config(**change), seed=1, num_shards=2)
    assert not (tmp_path / "new").exists()


def test_a_saved_table_that_has_changed_is_refused(saved, tmp_path):
    part = max(saved.paths(), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[-2] ^= 1  # a digit of the last number: as many bytes and rows as before
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{part.name} has changed since it was written"):
        warm_start(saved.directory, tmp_path / "new", name="new", config=config(), seed=9, num_shards=5)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("bounds", "fits"), [((-10, 0.05), False), ((-10, 0.4), False), ((-1.2, 1.2), True), ((-10, 10), True)]
)
def test_bounds_that_would_cut_what_was_learnt_are_refused(saved, tmp_path, bounds, fits):
    """A rule clips the change from the initial vector at each push, so these vectors would not survive their first."""
    target = config(initial_range=0.1, optimizer={"rule": "sgd", "learning_rate": 0.1, "weight_bounds": bounds})
    if fits:
        warm_start(saved.directory, tmp_path / "new", name="new", config=target, seed=9, num_shards=5)
        return
    with pytest.raises(CheckpointError, match=r"weight_bounds \[.*the first push of their keys would cut them"):
        warm_start(saved.directory, tmp_path / "new", name="new", config=target, seed=9, num_shards=5)
    assert not (tmp_path / "new").exists()
