"""Our table against one made of Python dictionaries and NumPy scalars: any sequence of everything it can do."""

import copy
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paddlewheel.pserver import engine, native, row_parts, saved_tables
from paddlewheel.pserver.config import TableConfig, TableLifecycle, table_id

POOL = (np.arange(1, 61, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
WIDTH = 3
PARTS = f"{table_id('t'):03d}"
f4 = np.float32
raw = saved_tables._raw_rows

pytestmark = pytest.mark.needs("our own tables")


class Row:
    """What a table knows of one key."""

    def __init__(self, config):
        self.config = config
        self.shows = self.clicks = self.first = self.first_state = self.state = f4(0)
        self.embedding = np.zeros(WIDTH, f4)
        self.has, self.unseen = False, 0

    def score(self):
        clicked, unclicked = f4(self.config.clicked_weight), f4(self.config.unclicked_weight)
        return (self.shows - self.clicks) * unclicked + self.clicks * clicked

    def push(self, shows, clicks, gradients, rate):
        self.shows, self.clicks, self.unseen = self.shows + shows, self.clicks + clicks, 0
        lr = (
            f4(self.config.optimizer.learning_rate) if rate == 1 else f4(self.config.optimizer.learning_rate) * f4(rate)
        )
        (self.first,), self.first_state = self.step([self.first], self.first_state, gradients[:1], lr)
        if self.has:
            self.embedding, self.state = self.step(self.embedding, self.state, gradients[1:], lr)
        elif self.score() >= f4(self.config.admission_threshold or 0):
            self.has = True

    def step(self, weights, state, gradients, lr):
        """AdaGrad as README.md says, in the precisions of Paddle's."""
        optimizer = self.config.optimizer
        a0 = f4(optimizer.initial_accumulator)
        ratio, low, high = np.float64(np.sqrt(a0 / (a0 + state))), *map(f4, optimizer.weight_bounds)
        new = [
            np.clip(f4(w - ratio * (np.float64(lr) * np.float64(g))), low, high)
            for w, g in zip(weights, gradients, strict=True)
        ]
        total = np.float64(0)
        for g in gradients:
            total += np.float64(g) * np.float64(g)
        return np.array(new, f4), f4(state + total / len(gradients))

    def pulled(self):
        return np.array([self.shows, self.clicks, self.first, *self.embedding], f4)


class Tables(RuleBasedStateMachine):
    """The real one, its model, and marks with the model as it was then."""

    @initialize(
        admission=st.sampled_from([None, 2]),
        decay=st.sampled_from([1.0, 0.75]),
        shards=st.sampled_from([1, 3]),
        spills=st.booleans(),
        unseen=st.sampled_from([1, 2]),
        seed=st.integers(0, 1 << 30),
    )
    def begin(self, admission, decay, shards, spills, unseen, seed):
        lifecycle = TableLifecycle(show_click_decay=decay, delete_below_score=0.5, delete_after_unseen_days=unseen)
        self.folder = Path(tempfile.mkdtemp(prefix="paddlewheel-tables-"))
        self.config = TableConfig(
            width=WIDTH,
            admission_threshold=admission,
            lifecycle=lifecycle,
            shards=shards,
            spill=str(self.folder) if spills else None,
        )
        self.rng = np.random.default_rng(seed)
        self.table, self.rows = self.fresh(shards), {}
        self.marks, self.restores, self.waiting, self.saved = 0, 0, None, None

    def fresh(self, shards):
        config = self.config.model_copy(update={"shards": shards})
        options = {**engine.options("t", config), "log_removed": True, "threads": 2}
        if self.config.spill is not None:
            options["memory"] = 0  # the least that there is: 8 hot rows a shard
        return native.MemoryTable(options)

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()
            shutil.rmtree(self.folder)

    @rule(count=st.integers(1, 40), rate=st.sampled_from([1.0, 0.3]))
    def push(self, count, rate):
        keys = self.rng.choice(POOL, count, replace=False)
        values = self.rng.normal(size=(count, 4 + WIDTH)).astype(f4)
        values[:, 0] = 0
        values[:, 1] = self.rng.integers(1, 3, count)
        values[:, 2] = np.minimum(values[:, 1], self.rng.integers(0, 2, count))
        self.table.push(keys, values, rate)
        for key, row in zip(keys.tolist(), values, strict=True):
            self.rows.setdefault(key, Row(self.config)).push(row[1], row[2], row[3:], rate)

    @rule()
    def end_day(self):
        self.table.end_day()
        decay = f4(self.config.lifecycle.show_click_decay)
        for key, row in list(self.rows.items()):
            row.shows, row.clicks = row.shows * decay, row.clicks * decay
            if row.score() < 0.5 or row.unseen > self.config.lifecycle.delete_after_unseen_days:
                del self.rows[key]

    @rule(advance_day=st.booleans())
    def mark(self, advance_day):
        self.marks += 1
        self.waiting = (f"m{self.marks}", copy.deepcopy(self.rows))
        self.table.mark(self.waiting[0], advance_day=advance_day)
        if advance_day:
            for row in self.rows.values():
                row.unseen += 1

    @precondition(lambda self: self.waiting is not None)
    @rule(how=st.sampled_from(["whole", "changes", "lost changes", "drop"]), shards=st.sampled_from([1, 3, 4]))
    def save(self, how, shards):
        """What was saved is what was there at the mark, whatever has happened since; a save that is lost loses nothing.

        It is read back by a table of any number of shards, from the files alone, and as a whole table made of them.
        """
        (name, rows), self.waiting = self.waiting, None
        if how == "drop":
            self.table.drop(name)
            return
        since = None if how == "whole" else self.saved
        folder = self.folder / name
        (folder / PARTS).mkdir(parents=True)
        self.table.save(name, folder / PARTS, "" if since is None else since[0])
        if since is not None and how == "lost changes":
            shutil.rmtree(folder)
            return
        base = None if since is None else saved_tables.Base(f"../{since[1].name}", self.opened(since[1]).checksum)
        saved_tables.record(folder, "t", self.config, 0, self.config.shards, base=base)
        self.saved = (name, folder)
        saved = self.opened(folder)
        assert saved.num_keys == len(rows)
        self.check_loaded(saved, rows, shards)
        self.check_rows(np.concatenate([np.empty(0, row_parts.row_type(self.config)), *raw(saved)]), rows)
        for shard in range(self.config.shards):
            keys = np.concatenate([np.empty(0, np.uint64), *(b["key"] for b in raw(saved, [shard]))])
            assert sorted(keys.tolist()) == sorted(k for k in rows if k % self.config.shards == shard)
        whole = saved_tables.reshard(saved, folder.with_name(f"{name}-whole"), shards)
        assert whole.base is None
        self.check_loaded(whole, rows, 3)

    @rule(how=st.sampled_from(["whole", "changes", "changes"]), advance_day=st.booleans())
    def checkpoint(self, how, advance_day):
        self.mark(advance_day)
        self.save(how, 3)
        if advance_day:
            self.end_day()

    @precondition(lambda self: self.waiting is None)
    @rule()
    def days_without_a_push(self):
        for _ in range(2):
            self.mark(advance_day=True)
            self.table.drop(self.waiting[0])
            self.waiting = None
            self.end_day()

    def opened(self, folder):
        return saved_tables.open_table(folder)

    def check_loaded(self, saved, rows, shards):
        loaded = self.fresh(shards)
        try:
            for link in saved.links:
                loaded.load(link.folder)
            self.check(loaded, rows)
        finally:
            loaded.close()

    @precondition(lambda self: self.waiting is None and self.saved is not None)
    @rule(shards=st.sampled_from([1, 2, 3, 4]))
    def go_back_to_what_was_saved(self, shards):
        """As a run does after a failure: the next changes lead on from the restored state."""
        saved = self.opened(self.saved[1])
        self.table.close()
        self.config = self.config.model_copy(update={"shards": shards})
        self.table, self.restores = self.fresh(shards), self.restores + 1
        mark = f"r{self.restores}"
        for link in saved.links:
            self.table.load(link.folder, mark)
        self.saved = (mark, self.saved[1])
        self.rows = {}
        for found in np.concatenate(list(raw(saved)) or [np.empty(0, row_parts.row_type(self.config))]):
            row = self.rows[int(found["key"])] = Row(self.config)
            row.shows, row.clicks, row.first, row.first_state, row.state = (
                f4(found[field]) if found[field].ndim == 0 else f4(found[field][0])
                for field in ("shows", "clicks", "first", "first_state", "embedding_state")
            )
            row.embedding, row.has, row.unseen = (
                found["embedding"].copy(),
                bool(found["meta"] >> 30 & 1),
                int(found["meta"] & 4095),
            )

    @rule()
    def pull(self):
        keys = self.rng.permutation(POOL)
        found = self.table.pull(keys)
        for key, row in zip(keys.tolist(), found, strict=True):
            expected = self.rows[key].pulled() if key in self.rows else np.zeros(3 + WIDTH, f4)
            np.testing.assert_array_equal(row + f4(0), expected + f4(0))

    @invariant()
    def as_many_rows(self):
        if hasattr(self, "table"):
            assert self.table.statistics().rows == len(self.rows)

    def check(self, table, rows):
        self.check_rows(table.get_rows(POOL).reshape(-1).view(row_parts.row_type(self.config)), rows)
        assert table.statistics().rows == len(rows)

    def check_rows(self, raw_N, rows):
        by_key = {int(found["key"]): found for found in raw_N if found["key"]}
        assert by_key.keys() == rows.keys()
        absent = np.zeros((), row_parts.row_type(self.config))
        for key in POOL.tolist():
            found = by_key.get(key, absent)
            if key not in rows:
                assert found["key"] == 0
                continue
            row = rows[key]
            assert found["key"] == key
            assert (found["meta"] >> 30 & 1, found["meta"] & 4095) == (row.has, row.unseen)
            np.testing.assert_array_equal(
                [found["shows"], found["clicks"], found["first"], *found["first_state"], *found["embedding_state"]],
                [row.shows, row.clicks, row.first, row.first_state, row.state],
            )
            np.testing.assert_array_equal(found["embedding"] + f4(0), row.embedding + f4(0))


Tables.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestTables = Tables.TestCase
