"""Training day by day: the job's `train.days` block, and which days a run trains. Pure decisions; no files.

A run trains its days one after the other, each as one epoch; epochs count on from run to run. So the days of a job are
one list: those trained already, as its checkpoint tells, and then those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from paddlewheel.data_pipeline.days import Day, parse_days


class DaysError(ValueError):
    """These days cannot be trained."""


class PublishConfig(BaseModel):
    """A base and deltas of every table, one a day, for whoever serves the model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    directory: str | None = None
    """Folder of the chains, `<directory>/<table>/<number>-base-<day>` and so on. None: `published` in `run_dir`."""

    base_every_days: int = Field(default=7, ge=1)
    """Every so many days a base (all rows) begins a new chain; the days between get deltas (what changed)."""

    dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """Type of the embeddings in the files."""


class DaysConfig(BaseModel):
    """Training day by day. `paddlewheel train JOB --days A..B` sets `range`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    range: str | None = None
    """First and last day, such as `2026-01-01..2026-01-07`, or one day. Days that are trained already are left out."""

    column: str = "day"
    """Partition of the training data that names the day: files lie in folders `day=2026-01-31`."""

    skip_missing: bool = False
    """A day of the range without data is left out. Otherwise it is an error."""

    progressive_validation: bool = True
    """Score each day's rows with the model of the days before, then train on them (progressive validation)."""

    publish: PublishConfig | None = None
    """Write a base or delta of every table after each day. None: nothing is written beside checkpoints."""

    @field_validator("range")
    @classmethod
    def _is_a_range(cls, given: str | None) -> str | None:
        if given is not None:
            parse_days(given)
        return given


def choose(
    wanted: Sequence[Day], present: Sequence[Day], *, trained: Sequence[Day], current: Day | None, skip_missing: bool
) -> tuple[Day, ...]:
    """The days of a job, in order: those trained, then those that a run trains.

    Args:
        wanted: the days of the run's range.
        present: days that have data.
        trained: days that the checkpoint has behind it, in order.
        current: the day in the middle of which the checkpoint stands; None: it stands between two days.
        skip_missing: see `DaysConfig`.

    Raises:
        DaysError: a wanted day has no data, or lies before the last trained one without having been trained; or the
            run leaves out the rest of the current day.
    """
    past = set(trained)
    left = [day for day in wanted if day not in past]
    missing = [day for day in left if day not in set(present)]
    if missing and not skip_missing:
        named = ", ".join(day.isoformat() for day in missing[:5]) + (" ..." if len(missing) > 5 else "")
        known = f"{present[0]} to {present[-1]}" if present else "no day"
        raise DaysError(
            f"no data for {named} (of {len(left)} days to train; the data has {len(present)} days, {known}). Bring the "
            "data, choose other days, or give --skip-missing-days (train.days.skip_missing)"
        )
    left = [day for day in left if day in set(present)]
    last = current or (trained[-1] if trained else None)
    early = [day for day in left if last is not None and day < last]
    if early:
        raise DaysError(
            f"{early[0]} lies before {last}, the last day that was trained, and was not trained itself: days are "
            "trained in their order. Leave it out, or begin again with --from-scratch"
        )
    if current is not None and left[:1] != [current]:
        raise DaysError(
            f"the checkpoint stands in the middle of {current}, which is not the first of the days to train: begin the "
            f"range with it (--days {current}..{max(current, wanted[-1])})"
        )
    if not left and not trained:
        raise DaysError("none of these days has data")
    return (*trained, *left)
