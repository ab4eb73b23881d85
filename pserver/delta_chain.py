"""Chains on disk: what a table was after each of its days, as numbered bases and deltas that others may follow.

    <directory>/000001-base-2026-01-01/     all rows (`export`), and link.json
    <directory>/000002-delta-2026-01-02/    what changed and which keys are gone (`delta`), and link.json
    <directory>/.last/                      the saved table that the newest link was made of, to make the next one from

A link appears under its name when it is whole. Numbers count on without a gap; `follow` refuses a chain in which one is
missing or does not lead on from the one before.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from paddlewheel.pserver import delta, export, saved_tables
from paddlewheel.pserver.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINK, _LAST = "link.json", ".last"
_NAME = re.compile(r"(\d{6,})-(base|delta)-([\w.-]+)")


class Link(BaseModel):
    """What one link says about itself.

    num_boundaries: day boundaries that the table had had when it was saved. num_rows: of a base, all; of a delta, those
    that changed. num_removed: keys that are gone since the link before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    number: int
    kind: Literal["base", "delta"]
    day: str
    content_id: str
    num_boundaries: int
    num_rows: int
    num_removed: int

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.number:06d}-{self.kind}-{self.day}"


def links(directory: Path) -> list[Link]:
    """All links in a folder, by number. Raises CheckpointError when one cannot be read."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if _NAME.fullmatch(path.name):
            try:
                link = Link.model_validate_json((path / _LINK).read_text())
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} is not a whole link of a chain: {error}") from error
            if link.folder != path.name:
                raise CheckpointError(f"{path} says that it is {link.folder}: it was renamed, or copied")
            found.append(link)
    found.sort(key=lambda link: link.number)
    return found


def append(
    directory: Path,
    saved: saved_tables.SavedTable,
    *,
    day: str,
    num_boundaries: int,
    base_every: int,
    dtype: export.Dtype = "float32",
) -> Link | None:
    """Add the saved table of a day: a delta, or a base when `base_every` links have passed or nothing leads on.

    None when the newest link is this one already. Nothing leads on after a restore from a checkpoint before the newest
    link, or when `.last` is gone or of another content. Raises CheckpointError or OSError; then there is no new link.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if saved.base is not None:
        with tempfile.TemporaryDirectory(prefix=".whole-", dir=directory) as temporary:
            whole = saved_tables.reshard(saved, Path(temporary, saved.name), len(saved.parts))
            return append(directory, whole, day=day, num_boundaries=num_boundaries, base_every=base_every, dtype=dtype)
    known = links(directory)
    newest = known[-1] if known else None
    if newest is not None and newest.day == day and newest.content_id == saved.content_id:
        return None
    number = newest.number + 1 if newest else 1
    since_base = next((count for count, link in enumerate(reversed(known), 1) if link.kind == "base"), base_every)
    before = None if newest is None or since_base >= base_every or newest.day >= day else _last(directory, newest)
    draft = directory / f".{number:06d}"
    shutil.rmtree(draft, ignore_errors=True)
    if before is None or newest is None:
        exported = export.export_table(saved, draft, dtype=dtype)
        kind, num_rows, num_removed = "base", exported.num_rows, 0
    else:
        passed = num_boundaries - newest.num_boundaries
        decay = saved.config.lifecycle.show_click_decay**passed
        made = delta.write_delta(before, saved, draft, dtype=dtype, count_decay=decay)
        kind, num_rows, num_removed = "delta", made.num_changed, made.num_removed
    link = Link(
        number=number,
        kind=kind,
        day=day,
        content_id=saved.content_id,
        num_boundaries=num_boundaries,
        num_rows=num_rows,
        num_removed=num_removed,
    )
    (draft / _LINK).write_text(link.model_dump_json(indent=1) + "\n")
    _keep(directory, saved)
    draft.rename(directory / link.folder)
    return link


def follow(directory: Path, to: Path, *, day: str | None = None) -> delta.Chained:
    """Write what the table was after a day (None: the newest one) into the new folder `to`, as one export.

    Raises CheckpointError for a chain without a base, with a gap, or out of order.
    """
    known = links(directory)
    if day is not None:
        at = [place for place, link in enumerate(known) if link.day == day]
        if not at:
            raise CheckpointError(f"{directory} has no link of {day}: it has {_days(known)}")
        known = known[: at[-1] + 1]
    bases = [place for place, link in enumerate(known) if link.kind == "base"]
    if not bases:
        raise CheckpointError(f"{directory} holds no base to begin with: it has {_days(known)}")
    chain = known[bases[-1] :]
    for link, following in itertools.pairwise(chain):
        if following.number != link.number + 1:
            raise CheckpointError(
                f"{directory}: after {link.folder} comes {following.folder}: link {link.number + 1} is missing"
            )
    paths = [directory / link.folder for link in chain]
    return delta.apply_deltas(paths[0], paths[1:], to)


def _days(known: Sequence[Link]) -> str:
    return ", ".join(link.folder for link in known) or "no links"


def _last(directory: Path, newest: Link) -> saved_tables.SavedTable | None:
    try:
        saved = saved_tables.open_table(directory / _LAST)
    except CheckpointError:
        return None
    return saved if saved.content_id == newest.content_id else None


def _keep(directory: Path, saved: saved_tables.SavedTable) -> None:
    """Hold on to the saved table's files, whatever becomes of its checkpoint: by links where the disk has them."""
    kept = directory / _LAST
    shutil.rmtree(kept, ignore_errors=True)
    (kept / saved.folder.name).mkdir(parents=True)
    files = [(path, kept / saved.folder.name / path.name) for path in saved.paths()]
    for source, target in [*files, (saved.directory / saved_tables.DESCRIPTION, kept / saved_tables.DESCRIPTION)]:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
