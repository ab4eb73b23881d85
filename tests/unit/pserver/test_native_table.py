"""Our table: what it does beyond Paddle's, and every way in which it can refuse. Bits and sequences: tests/property."""

import importlib.metadata
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddlewheel.pserver import engine, native, row_parts
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.initializer import Initializer
from paddlewheel.pserver.native import MemoryTable, NativeError
from tests.support.reference_rules import Block

KEYS = (np.arange(1, 2001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
f4 = np.float32

needs_library = pytest.mark.needs("our own tables")


@pytest.fixture
def make_table():
    made = []

    def make(more=None, seed=0, **config):
        fields = {"width": 4, "shards": 3, "optimizer": {"rule": "sgd", "learning_rate": 0.5}, **config}
        made.append(MemoryTable({**engine.options("t", TableConfig(**fields), seed=seed), **(more or {})}))
        return made[-1]

    yield make
    for table in made:
        table.close()


def pushed(count, gradient=1.0, shows=1.0, clicks=0.0, width=4):
    values = np.full((count, 4 + width), gradient, f4)
    values[:, :3] = 0, shows, clicks
    return values


@needs_library
class TestBeyondPaddle:
    def test_the_push_that_creates_a_key_trains_it_if_it_is_told_to(self, make_table):
        plain, training = make_table(), make_table(train_new_keys=True)
        for table in (plain, training):
            table.push(KEYS[:1], pushed(1))
        assert plain.pull(KEYS[:1]).tolist() == [[1, 0, -0.5, 0, 0, 0, 0]]
        assert training.pull(KEYS[:1]).tolist() == [[1, 0, -0.5, -0.5, -0.5, -0.5, -0.5]]

    def test_keys_below_admission_are_not_trained_if_they_are_not_to_be(self, make_table):
        table = make_table(admission_threshold=3, train_below_admission=False, train_new_keys=True)
        for _ in range(2):
            table.push(KEYS[:1], pushed(1))
        assert table.pull(KEYS[:1]).tolist() == [[2, 0, 0, 0, 0, 0, 0]]
        table.push(KEYS[:1], pushed(1))
        assert table.pull(KEYS[:1]).tolist() == [[3, 0, -0.5, -0.5, -0.5, -0.5, -0.5]]

    def test_classes_of_keys_have_admissions_of_their_own(self, make_table):
        table = make_table({"admission": (1.0, 3.0)})
        values = pushed(2)
        values[1, 0] = 1
        has = []
        for _ in range(3):
            table.push(KEYS[:2], values)
            raw = (
                table.get_rows(KEYS[:2])
                .reshape(-1)
                .view(row_parts.row_type(TableConfig(width=4, optimizer={"rule": "sgd"})))
            )
            has.append([bool(meta >> 30 & 1) for meta in raw["meta"]])
        assert has == [[True, False], [True, False], [True, True]]

    def test_a_push_can_scale_the_learning_rate(self, make_table):
        table = make_table()
        table.push(KEYS[:1], pushed(1), rate=0.25)
        table.push(KEYS[:1], pushed(1), rate=0)
        assert table.pull(KEYS[:1])[0, :3].tolist() == [2, 0, -0.125]

    def test_l2_is_on_the_true_value(self, make_table):
        config = TableConfig(width=4, l2=0.1, initial_range=0.5, optimizer={"rule": "sgd", "learning_rate": 0.5})
        table = make_table(seed=7, l2=0.1, initial_range=0.5)
        initial_UW = Initializer("t", config, 7).effective(np.zeros((5, 5), f4), KEYS[:5], np.ones(5, np.bool_))
        table.push(KEYS[:5], pushed(5, gradient=0))  # creates
        for step in range(1, 4):
            table.push(KEYS[:5], pushed(5, gradient=0))
            value_UK = initial_UW[:, 1:] + table.pull(KEYS[:5])[:, 3:]
            np.testing.assert_allclose(value_UK, initial_UW[:, 1:] * (1 - 0.05) ** step, rtol=1e-5)

    @pytest.mark.parametrize("trains_new", [False, True], ids=["", "train_new_keys"])
    @pytest.mark.parametrize("rule", ["sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"])
    def test_l2_adds_the_true_value_to_the_gradient_of_every_rule(self, make_table, rule, trains_new):
        fields = {"l2": 0.3, "initial_range": 0.5, "train_new_keys": trains_new}
        optimizer = {"rule": rule, "learning_rate": 0.1, "weight_bounds": [-0.4, 0.4]}
        config = TableConfig(width=4, optimizer=optimizer, **fields)
        table = make_table(seed=7, optimizer=optimizer, **fields)
        keys, rng = KEYS[:5], np.random.default_rng(2)
        initial_UW = Initializer("t", config, 7).effective(np.zeros((5, 5), f4), keys, np.ones(5, np.bool_))[:, 1:]
        assert np.abs(initial_UW).max() > 0.1
        firsts = [Block(config.optimizer, 1) for _ in keys]
        embeddings = [Block(config.optimizer, 4) for _ in keys]
        for step in range(8):
            values = pushed(5)
            values[:, 3:] = rng.normal(size=(5, 5))
            table.push(keys, values)
            for i, (first, embedding) in enumerate(zip(firsts, embeddings, strict=True)):
                first.update(values[i, 3:4] + 0.3 * first.w)
                if step or trains_new:
                    embedding.update(values[i, 4:] + 0.3 * (initial_UW[i] + embedding.w))
            found = table.pull(keys)
            np.testing.assert_allclose(found[:, 2], [first.w[0] for first in firsts], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found[:, 3:], [each.w for each in embeddings], rtol=1e-4, atol=1e-5)

    def test_bfloat16_rounds_so_that_small_steps_add_up(self, make_table):
        table = make_table(dtype="bfloat16", optimizer={"rule": "sgd", "learning_rate": 1e-4})
        table.push(KEYS, pushed(len(KEYS), gradient=-1e4))  # creates
        table.push(KEYS, pushed(len(KEYS), gradient=-1e4))  # to 1, where neighbours are 0.0078 apart
        for _ in range(50):
            table.push(KEYS, pushed(len(KEYS), gradient=-1))
        values = table.pull(KEYS)[:, 3:]
        assert values.mean() == pytest.approx(1 + 50e-4, abs=3e-4)
        assert len(np.unique(values)) > 1
        assert not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()

    def test_bfloat16_repeats_bit_for_bit_and_goes_on_alike_after_a_restore(self, make_table, tmp_path):
        rng = np.random.default_rng(1)
        steps = [pushed(len(KEYS)) * rng.normal(size=(len(KEYS), 8)).astype(f4) for _ in range(6)]
        for values in steps:
            values[:, :3] = 0, 1, 0
        one, other = make_table(dtype="bfloat16"), make_table(dtype="bfloat16", shards=5)
        for values in steps[:3]:
            one.push(KEYS, values)
        one.mark("m")
        one.save("m", tmp_path)
        other.load(tmp_path)
        for values in steps[3:]:
            one.push(KEYS, values)
            other.push(KEYS, values)
        np.testing.assert_array_equal(one.get_rows(KEYS)[:, :16], other.get_rows(KEYS)[:, :16])
        np.testing.assert_array_equal(one.pull(KEYS), other.pull(KEYS))

    def test_a_full_table_keeps_the_keys_with_the_highest_scores(self, make_table):
        table = make_table({"max_rows": 1200, "threads": 1})
        valued = KEYS[:300]
        for _ in range(3):
            table.push(valued, pushed(300))
        rng = np.random.default_rng(3)
        for _ in range(20):
            table.push(rng.integers(1, 1 << 63, 500, dtype=np.uint64), pushed(500))
            assert table.statistics().rows <= 1200
        assert (table.pull(valued)[:, 0] == 3).all()
        found = table.statistics()
        assert found.evicted == 300 + 20 * 500 - found.rows
        assert found.max_rows == 1200

    def test_of_equal_scores_the_keys_unseen_for_longest_go(self, make_table):
        table = make_table({"max_rows": 3000, "threads": 1})
        table.push(KEYS[:1000], pushed(1000))
        table.mark("m", advance_day=True)
        table.drop("m")
        table.push(KEYS[1000:], pushed(1000))
        table.push(np.arange(1, 1600, dtype=np.uint64) << np.uint64(20), pushed(1599))
        assert table.statistics().evicted > 400
        assert (table.pull(KEYS[1000:])[:, 0] == 1).all()

    def test_memory_returns_after_deletes(self, make_table):
        table = make_table(lifecycle={"delete_below_score": 2.0})
        many = (np.arange(1, 200_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
        table.push(many, pushed(len(many)))
        table.push(many[:1000], pushed(1000))
        before = table.statistics()
        table.end_day()
        after = table.statistics()
        assert after.rows == 1000
        assert after.row_bytes < before.row_bytes / 20
        assert after.index_bytes < before.index_bytes / 10
        assert (table.pull(many[:1000])[:, 0] == 2).all()


@needs_library
def test_changes_since_a_save_lead_to_the_same_table(make_table, tmp_path):
    """Rows that changed, keys that are gone, and days: those that did not change have been unseen for longer, too."""
    life = {"delete_below_score": 2.0}
    one, other = make_table({"log_removed": True}, lifecycle=life), make_table(lifecycle=life, shards=2)
    one.push(KEYS, pushed(len(KEYS), shows=2.0))
    one.push(KEYS[:100], pushed(100, clicks=0.0))
    for name, since in (("whole", ""), ("changes", "whole"), ("more", "changes")):
        one.mark(name, advance_day=True)
        (tmp_path / name).mkdir()
        one.save(name, tmp_path / name, since)
        one.push(KEYS[50:150], pushed(100))
        one.end_day()
        one.push(np.array([12345], np.uint64), pushed(1, shows=1.0))  # gone at the next boundary
    sizes = [
        sum(row_parts.read_header(p).num_rows for p in (tmp_path / n).iterdir()) for n in ("whole", "changes", "more")
    ]
    assert sizes == [2000, 101, 101]
    assert row_parts.read_removed(sorted((tmp_path / "more").iterdir())[12345 % 3]).tolist() == [12345]
    one.mark("end")
    (tmp_path / "end").mkdir()
    one.save("end", tmp_path / "end", "more")
    for name in ("whole", "changes", "more", "end"):
        other.load(tmp_path / name)
    keys = np.append(KEYS, np.uint64(12345))
    np.testing.assert_array_equal(other.get_rows(keys), one.get_rows(keys))
    assert other.statistics().rows == one.statistics().rows == 2001


@needs_library
class TestErrors:
    def test_an_option_that_it_does_not_know(self):
        with pytest.raises(NativeError, match="no option colour"):
            MemoryTable({"width": 4, "colour": 1})

    def test_a_save_that_cannot_be_written_names_the_file_and_the_next_one_works(self, make_table, tmp_path):
        table = make_table()
        table.push(KEYS, pushed(len(KEYS)))
        full = tmp_path / "full"
        full.mkdir()
        (full / "part-000-00001").symlink_to("/dev/full")
        table.mark("m")
        with pytest.raises(NativeError, match=r"part-000-00001 cannot be written: No space left"):
            table.save("m", full)
        with pytest.raises(NativeError, match="no mark m is waiting"):
            table.save("m", full)
        (tmp_path / "whole").mkdir()
        table.mark("n")
        table.save("n", tmp_path / "whole")
        assert sum(row_parts.read_header(path).num_rows for path in (tmp_path / "whole").iterdir()) == len(KEYS)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda data: data[:-1], "cut short"),
            (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "damaged: its hash"),
            (lambda data: data[:41] + bytes([data[41] ^ 1]) + data[42:], "damaged, or was never finished"),
            (lambda data: bytes(80) + data[80:], "not a part"),
        ],
        ids=["cut", "row", "header", "unfinished"],
    )
    def test_damage_is_found_when_a_part_is_loaded(self, make_table, tmp_path, damage, words):
        table = make_table()
        table.push(KEYS, pushed(len(KEYS)))
        table.mark("m")
        table.save("m", tmp_path)
        part = tmp_path / "part-000-00001"
        part.write_bytes(damage(part.read_bytes()))
        with pytest.raises(NativeError, match=words):
            make_table().load(tmp_path)

    def test_a_part_of_another_table_is_refused(self, make_table, tmp_path):
        table = make_table()
        table.push(KEYS, pushed(len(KEYS)))
        table.mark("m")
        table.save("m", tmp_path)
        for other in ({"width": 5}, {"optimizer": {"rule": "adagrad"}}, {"dtype": "bfloat16"}):
            with pytest.raises(NativeError, match="another width, rule or dtype"):
                make_table(**other).load(tmp_path)

    def test_changes_since_an_unknown_mark(self, make_table, tmp_path):
        table = make_table({"log_removed": True})
        table.mark("m")
        with pytest.raises(NativeError, match="nothing is known of changes since before"):
            table.save("m", tmp_path, "before")

    def test_no_folder_to_load_and_none_to_spill_to(self, make_table, tmp_path):
        with pytest.raises(NativeError, match="cannot be read"):
            make_table().load(tmp_path / "none")
        with pytest.raises(NativeError, match="holds no part"):
            make_table().load(tmp_path)
        with pytest.raises(NativeError, match="no file can be made"):
            make_table(spill=str(tmp_path / "none"))

    def test_rows_on_disk_are_those_of_a_table_in_memory(self, make_table, tmp_path):
        """Popular and other keys, while the index takes more and more of the memory."""
        life = {"show_click_decay": 0.9, "delete_below_score": 1.5}
        fields = {"width": 16, "shards": 2, "optimizer": {"rule": "adagrad"}, "lifecycle": life}
        plain = make_table(**fields)
        spilling = make_table({"memory": 1_400_000}, spill=str(tmp_path), **fields)
        keys = (np.arange(1, 30_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
        rng = np.random.default_rng(1)
        for step in range(40):
            asked = np.unique(keys[: 750 * (step + 1)][(rng.zipf(1.3, 3000) * 7919) % (750 * (step + 1))])
            asked = np.union1d(asked, keys[750 * step : 750 * (step + 1)])
            values = pushed(len(asked), width=16)
            values[:, 3:] = rng.normal(size=(len(asked), 17))
            np.testing.assert_array_equal(spilling.pull(asked), plain.pull(asked))
            for table in (plain, spilling):
                table.push(asked, values)
                if step == 20:
                    table.mark("m")
                if step == 30:
                    table.end_day()
        found = spilling.statistics()
        assert found.rows == plain.statistics().rows > 15_000
        assert found.row_bytes + found.index_bytes < 1_400_000 + 4 * (96 << 10), (
            "a unit a shard is all that is too much"
        )
        assert found.row_bytes < found.rows * 96 / 2
        folders = tmp_path / "plain", tmp_path / "spilling"
        for table, folder in zip((plain, spilling), folders, strict=True):
            folder.mkdir()
            table.save("m", folder)
        for part in ("part-000-00000", "part-000-00001"):
            assert (folders[0] / part).read_bytes() == (folders[1] / part).read_bytes()
        assert (spilling.get_rows(keys) == plain.get_rows(keys)).all()
        spilling.end_day()
        plain.end_day()
        assert (spilling.get_rows(keys) == plain.get_rows(keys)).all()

    def test_a_full_disk_under_spilled_rows_is_an_error_and_nothing_is_lost(self, tmp_path):
        """In a process that may write files of 300 MiB only: the second region of 256 MiB does not fit."""
        code = f"""
import signal, numpy as np
from paddlewheel.pserver import engine, native
from paddlewheel.pserver.config import TableConfig
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
table = native.MemoryTable(engine.options("t", TableConfig(width=1024, spill={str(tmp_path)!r})))
done, error = [], ""
for start in range(1, 200_000, 4000):
    keys = np.arange(start, start + 4000, dtype=np.uint64) << np.uint64(20) | np.uint64(start)
    values = np.ones((4000, 1028), np.float32)
    try:
        table.push(keys, values)
    except native.NativeError as failed:
        error = str(failed)
        break
    done.append(keys)
keys = np.concatenate(done)
assert "spill: the file cannot grow" in error, error
assert len(done) > 5
assert (table.pull(keys)[:, 0] == 1).all()
table.push(done[0], np.ones((4000, 1028), np.float32))
assert (table.pull(done[0])[:, 0] == 2).all()
"""
        limit = 300 << 20
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert done.returncode == 0, done.stderr


class TestChoosing:
    """Where ours cannot be had, Paddle's does the work, unless a job needs ours."""

    @pytest.fixture(autouse=True)
    def _afresh(self):
        native._library.cache_clear()
        yield
        native._library.cache_clear()

    @pytest.fixture
    def broken(self, monkeypatch, tmp_path):
        library = tmp_path / "table.so"
        library.write_text("no library")
        monkeypatch.setenv(native._PATH_VARIABLE, str(library))
        return str(library)

    def test_auto_falls_back_with_the_reason(self, broken):
        chosen = engine.choose({"t": TableConfig()}, num_servers=1, rank=0)
        assert chosen.ours == frozenset()
        assert f"{broken} does not load" in chosen.warning

    def test_paddle_needs_no_reason(self, broken):
        assert engine.choose({"t": TableConfig(engine="paddle")}, num_servers=1, rank=0) == (frozenset(), "")

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"engine": "paddlewheel"}, "tables.t.engine is 'paddlewheel'"),
            ({"max_keys": 5000}, "tables.t.max_keys is 5000, which needs our own engine"),
        ],
    )
    def test_whoever_needs_ours_is_told(self, broken, config, words):
        with pytest.raises(NativeError, match=words):
            engine.choose({"t": TableConfig(**config)}, num_servers=1, rank=0)

    def test_paddle_cannot_be_asked_for_more(self):
        with pytest.raises(ValueError, match="dtype is 'bfloat16', which Paddle's table cannot do"):
            TableConfig(engine="paddle", dtype="bfloat16")

    def test_each_python_has_a_build_that_is_known(self):
        """Of every Python that the project runs on, one wheel: whoever adds a Python looks into its wheel first."""
        text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
        pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
        assert pythons
        assert sorted(native._KNOWN_LIBRARIES.values()) == sorted(pythons)

    def test_another_build_of_paddle_is_refused(self, monkeypatch):
        file = SimpleNamespace(parts=("paddle", "base", "libpaddle.so"), hash=SimpleNamespace(value="abc"))
        monkeypatch.setattr(importlib.metadata, "files", lambda _: [file])
        with pytest.raises(NativeError, match="has the sha256 abc"):
            native.check_wheel()
        assert not native.is_expected("auto")
        assert native.is_expected("paddlewheel")  # it will say so itself, and end

    def test_no_compiler_and_no_place(self, monkeypatch, tmp_path):
        monkeypatch.setattr(native, "_places", lambda: [tmp_path / "none.so"])
        monkeypatch.setattr(shutil, "which", lambda _: None)
        with pytest.raises(NativeError, match="no C\\+\\+ compiler"):
            native.build()
        monkeypatch.setattr(shutil, "which", lambda name: name)
        monkeypatch.setattr("paddlewheel.compiled.is_writable", lambda _: False)
        with pytest.raises(NativeError, match="can be written to"):
            native.build()

    def test_a_compiler_that_fails_is_quoted(self, monkeypatch, tmp_path):
        compiler = tmp_path / "g++"
        compiler.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(native, "_places", lambda: [tmp_path / "none.so"])
        monkeypatch.setenv("CXX", str(compiler))
        with pytest.raises(NativeError, match="this compiler is broken"):
            native.build()


@needs_library
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('options["learning_rate"] = 0.051', "the rule SparseAdaGradSGDRule differs from Paddle's"),
        ('options["rule"] = 0', "keeps another state"),
        ('rule = ("NoSuchRule", rule[1])', "has no SparseValueSGDRule named NoSuchRule"),
        ("core.__file__ = native.__file__", "is not loaded in this process"),
        ("", "nothing is wrong"),
    ],
)
def test_what_differs_from_paddle_is_refused_before_a_server_starts(change, words):
    code = f"""
from types import SimpleNamespace
from paddlewheel.pserver import engine, native, paddle_core
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.descriptor import rule_description
config = TableConfig(width=5)
options, rule = engine.options("t", config), rule_description(config)
core = SimpleNamespace(__file__=paddle_core.load()[0].__file__)
{change}
try:
    native.register({{"t": options}}, {{"t": rule}}, core)
    print("nothing is wrong")
    native.check_start()
except native.NativeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert words in done.stdout, done.stdout + done.stderr
    if not change:
        assert "did not make table" in done.stdout
