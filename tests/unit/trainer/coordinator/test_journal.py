"""The journal on a disk: damaged, removed or cut while it is written; and what the next coordinator makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.trainer.coordinator import journal
from paddlewheel.trainer.coordinator.journal import Journal
from tests.support.plans import record


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    found = Journal(path)
    try:
        yield found
    finally:
        found.close()


def write(path: Path, *kinds: str) -> None:
    with opened(path) as found:
        for kind in kinds:
            found.write(record("stop", reason=kind))


def kinds(path: Path) -> list[str]:
    return [found.reason for found in journal.read(path).records]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_what_is_sealed_is_read_back(tmp_path_factory: pytest.TempPathFactory, fields: dict) -> None:
    path = tmp_path_factory.mktemp("j") / "journal.jsonl"
    over = record("over", record=1, time=1.5, result=fields)
    path.write_bytes(journal.seal(over.model_dump()) + b"\n")
    assert journal.read(path) == journal.Content((over,))


def test_numbers_go_on_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, "one", "two")
    write(path, "three")
    assert [found.record for found in journal.read(path).records] == [1, 2, 3]


def test_damage_is_put_aside_told_and_missed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, "one", "two", "three")
    path.write_bytes(path.read_bytes().replace(b"two", b"tow"))
    assert journal.read(path).damaged == (2,)
    told = journal.put_damaged_aside(path)
    assert told is not None
    assert "line 2" in told
    assert "the checkpoints decide" in told
    assert b"tow" in (tmp_path / "journal.jsonl.damaged").read_bytes()
    assert kinds(path) == ["one", "three"]
    assert journal.read(path).missing == (2,)
    assert journal.put_damaged_aside(path) is None
    assert journal.put_damaged_aside(tmp_path / "none") is None


def test_a_damaged_newest_record_is_missed_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, "one", "two")
    path.write_bytes(path.read_bytes().replace(b"two", b"tow"))
    write(path, "three")
    assert journal.read(path).missing == (2,)


@pytest.mark.parametrize(
    "change", [{"attempt": "2"}, {"attempt": None}, {"what": "dance"}, {"more": 1}, {"record": 0}], ids=str
)
def test_a_record_that_lacks_what_readers_rely_on_is_none(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "journal.jsonl"
    whole = record("attempt", record=1, time=1.0).model_dump()
    path.write_bytes(journal.seal(whole) + b"\n")
    assert journal.read(path).damaged == ()
    path.write_bytes(journal.seal(whole | change) + b"\n")
    assert journal.read(path).damaged == (1,)


@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_what_is_done_to_it_behind_its_back_is_told_once_and_writing_goes_on(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal.jsonl"
    with opened(path) as found:
        found.write(record("stop", reason="one"))
        found.write(record("stop", reason="two"))
        assert found.check() is None
        if how == "removed":
            path.unlink()
        elif how == "replaced":
            path.rename(tmp_path / "elsewhere")
            path.write_text("")
        else:
            os.truncate(path, path.stat().st_size - 5)
        told = found.check()
        assert told is not None
        assert f"was {how} while the job runs" in told
        found.write(record("stop", reason="three"))
        assert found.check() is None
    assert kinds(path) == (["one", "three"] if how == "cut" else ["three"])
    assert journal.read(path).missing == ((2,) if how == "cut" else (1, 2))
