"""The data benchmark: Parquet to batches ready for a step, under the ceiling of pyarrow alone."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddlewheel.deploy.bench.speed import machine, runs, systems
from paddlewheel.deploy.bench.speed.report import Report, ratios
from paddlewheel.deploy.bench.speed.workload import Workload

_SYSTEMS = {
    "paddlewheel": ("read", ()),
    "paddlewheel numpy": ("read", ("data.encoder_backend=numpy",)),
    "pyarrow iter_batches": ("iter_batches", ()),
    "pyarrow to_batches": ("to_batches", ()),
}
"""What is measured: a stage, and changes of the job."""


async def data(options: runs.Options, *, batches: Sequence[int], threads: Sequence[int], say: runs.Say) -> Report:
    """Rows/s of our loader (read, keys, shuffle, unique keys) beside pyarrow reading the same columns to NumPy."""
    environment, date = machine.describe(), runs.now()
    planned = []
    for batch_rows in batches:
        for number in threads:
            what = f"batch {batch_rows}, {number} thread{'s' if number > 1 else ''}"
            setting = options.setting(batch_rows=batch_rows)
            setting = replace(setting, overrides=(*setting.overrides, f"data.threads={number}"))
            for system, (stage, changes) in _SYSTEMS.items():
                changed = replace(setting, overrides=(*changes, *setting.overrides))
                params = {"system": system, "batch_rows": batch_rows, "threads": number, "setting": what}
                planned.append(
                    runs.Planned(
                        f"{system}, {what}",
                        params,
                        "rows/s",
                        lambda directory, stage=stage, setting=changed: systems.stage(stage, setting, directory),  # type: ignore[misc]
                    )
                )
    cases = await runs.measure(planned, options.repeat, options.work_directory, say)
    config = options.config(batches=list(batches), thread_counts=list(threads))
    report = Report("data", date, environment, config, cases)
    report.ratios = ratios(cases, of="paddlewheel", same="setting")
    report.notes = [
        (
            f"Rows/s of {options.work.num_slots} int64 slots and {options.work.num_dense} floats from Parquet with row "
            "groups of 65,536 rows, over all passes but the first. paddlewheel: keys of all ids, shuffle, transforms, "
            "unique keys of every batch; `paddlewheel numpy` without the library in C++."
        ),
        "pyarrow: the same columns to NumPy arrays, nothing else; threads > 1 is its own pool of a thread per core.",
    ]
    return report


def run_data_bench(
    *,
    rows: int = 1_000_000,
    batches: Sequence[int] = (2048,),
    threads: Sequence[int] = (1, 2),
    repeat: int = 3,
    passes: int = 3,
    seed: int = 1,
    work_directory: Path | None = None,
    say: runs.Say = lambda _: None,
) -> dict[str, Any]:
    """The data benchmark as plain data, for callers that are no command."""
    work_directory = work_directory or Path(tempfile.gettempdir(), "paddlewheel-bench")
    options = runs.Options(Workload(rows=rows, seed=seed), repeat, passes, len(os.sched_getaffinity(0)), work_directory)
    return asyncio.run(data(options, batches=batches, threads=threads, say=say)).to_json()
