"""The data benchmark runs, small, and every system reads every row."""

from __future__ import annotations

from paddlewheel.deploy.bench.speed.reading import run_data_bench


def test_the_data_benchmark(tmp_path):
    found = run_data_bench(rows=4000, batches=(512,), threads=(1,), repeat=1, passes=2, work_directory=tmp_path)
    assert [case["params"]["system"] for case in found["cases"]] == [
        "paddlewheel",
        "paddlewheel numpy",
        "pyarrow iter_batches",
        "pyarrow to_batches",
    ]
    assert all(case["median"] > 0 for case in found["cases"])
