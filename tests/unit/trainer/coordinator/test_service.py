"""The coordinator's service around the state machine: commits that surprise it, and attempts' numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.trainer.checkpoint.folder_store import Folder
from paddlewheel.trainer.coordinator import messages, resume
from paddlewheel.trainer.coordinator.journal import Journal
from paddlewheel.trainer.coordinator.records import AttemptOpened, RunBegan, TrainersRunning
from paddlewheel.trainer.coordinator.row_ledger import Cursor
from paddlewheel.trainer.coordinator.service import CoordinatorService, _last_attempt
from tests.support.plans import plan


class _Surprising(Folder):
    """A place whose draft is complete, and then raises something that nobody has thought of."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(path)
        self._error = error

    def check_complete(self, address: str) -> Any:
        raise self._error

    def discard(self, pattern: str) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("files"), "KeyError: 'files'"),
        (TypeError("no"), "TypeError: no"),
        (RuntimeError("the transfer was told to end"), "RuntimeError: the transfer"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_whatever_a_commit_raises_it_is_settled(tmp_path: Path, error: Exception, words: str) -> None:
    async def commit() -> list[messages.Event]:
        job = plan(run_dir=tmp_path)
        journal = Journal(job.journal)
        service = CoordinatorService(job, journal, _Surprising(tmp_path, error), resume.StartPoint(), 0)
        heard: list[messages.Event] = []
        service.apply = heard.append  # type: ignore[method-assign]
        await service._commit(messages.Commit(Cursor(3, ".step-3", {}), 1.0))
        await service._discard(".step-*")
        await service.close()
        journal.close()
        return heard

    (settled,) = asyncio.run(commit())
    assert isinstance(settled, messages.CommitFinished)
    assert settled.commit.cursor.step == 3
    assert words in settled.error


def test_no_number_of_an_attempt_is_used_twice_though_the_journal_lost_its_record() -> None:
    start = resume.StartPoint("/c/step-1", {"attempt": 4})
    opened = AttemptOpened(attempt=2, restore=None, parent=None, rows=0, num_servers=1, num_trainers=1)
    run = RunBegan(mode="train", resume="auto", restore=None, asked=None, checkpoints="/c")
    assert _last_attempt([opened, TrainersRunning(attempt=3, load_seconds=0.0)], start) == 4
    assert _last_attempt([TrainersRunning(attempt=7, load_seconds=0.0), run], start) == 7
    assert _last_attempt([], resume.StartPoint()) == 0
