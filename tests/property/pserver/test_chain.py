"""Chains on disk: what becomes a base, what a delta, and what is refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from paddlewheel.pserver import delta_chain, export, saved_tables
from paddlewheel.pserver.errors import CheckpointError
from tests.property.pserver.test_deltas import contents, save

DAYS = [f"2026-01-0{number}" for number in range(1, 8)]


def state(number: int) -> dict:
    """Keys 1 to 6 and, of three days each, some more."""
    keys = [*range(1, 7), *range(10 * number + 10, 10 * number + 13)]
    return {key: [4, 1, 0.5 + number, None if key % 3 else np.array([0.25, number])] for key in keys}


def append(folder, saved, number: int, base_every: int = 3) -> delta_chain.Link | None:
    return delta_chain.append(folder / "chain", saved, day=DAYS[number], num_boundaries=number, base_every=base_every)


@pytest.fixture
def saves(tmp_path):
    return [save(tmp_path / f"save-{number}", state(number), 2) for number in range(len(DAYS))]


def test_bases_and_deltas_by_number_outlive_the_checkpoints(tmp_path, saves):
    for number, saved in enumerate(saves):
        assert append(tmp_path, saved, number).number == number + 1
        assert append(tmp_path, saved, number) is None  # told twice, after a loss
        shutil.rmtree(saved.directory)  # a checkpoint is pruned
    known = delta_chain.links(tmp_path / "chain")
    assert [link.kind for link in known] == ["base", "delta", "delta"] * 2 + ["base"]
    assert [link.num_removed for link in known[1:3]] == [3, 3]
    for number, day in enumerate(DAYS):
        delta_chain.follow(tmp_path / "chain", tmp_path / day, day=day)
        full = save(tmp_path / f"again-{number}", state(number), 2)
        export.export_table(full, tmp_path / f"full-{number}")
        assert contents(tmp_path / day) == contents(tmp_path / f"full-{number}")
    assert delta_chain.follow(tmp_path / "chain", tmp_path / "newest").content_id == known[-1].content_id


def test_after_going_back_or_a_loss_in_between_the_next_link_is_a_base(tmp_path, saves):
    append(tmp_path, saves[0], 0)
    append(tmp_path, saves[1], 1)
    assert append(tmp_path, saves[3], 1).kind == "base"  # the same day was trained again, from an older checkpoint
    assert append(tmp_path, saves[4], 2).kind == "delta"
    shutil.rmtree(tmp_path / "chain" / ".last")
    assert append(tmp_path, saves[5], 3).kind == "base"
    # killed after it took hold of the save, before the link had its name
    shutil.rmtree(tmp_path / "chain" / ".last")
    delta_chain._keep(tmp_path / "chain", saves[6])
    (tmp_path / "chain" / ".000006").mkdir()
    assert append(tmp_path, saves[6], 4).kind == "base"
    assert [link.number for link in delta_chain.links(tmp_path / "chain")] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "chain").glob(".0*"))


def test_what_is_no_chain_is_refused(tmp_path, saves):
    with pytest.raises(CheckpointError, match="no base to begin with: it has no links"):
        delta_chain.follow(tmp_path / "nowhere", tmp_path / "out")
    for number in range(3):
        append(tmp_path, saves[number], number)
    folder = tmp_path / "chain"
    base, first, second = (folder / link.folder for link in delta_chain.links(folder))
    shutil.copytree(folder, tmp_path / "kept")
    base.rename(tmp_path / "base")
    with pytest.raises(CheckpointError, match="no base to begin with: it has 000002-delta"):
        delta_chain.follow(folder, tmp_path / "out")
    (tmp_path / "base").rename(base)
    (first / "link.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a whole link"):
        delta_chain.links(folder)
    # two deltas in each other's place, with descriptions to match
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)
    for name in ("removed.parquet", "delta.json"):
        one, other = (first / name).read_bytes(), (second / name).read_bytes()
        (first / name).write_bytes(other)
        (second / name).write_bytes(one)
    with pytest.raises(CheckpointError, match="missing, twice, or out of order"):
        delta_chain.follow(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_embeddings_are_counted_by_their_columns(saves):
    for number, saved in enumerate(saves):
        rows = list(saved_tables.read_rows(saved))
        expected = sum(int(some.has_embedding_N.sum()) for some in rows)
        assert 0 < saved_tables.count_embeddings(saved) == expected < saved.num_rows, number
