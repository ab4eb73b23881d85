from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paddlewheel.deploy import cli
from paddlewheel.deploy.bench.speed import runs, tables
from paddlewheel.deploy.bench.speed.report import Report
from paddlewheel.deploy.bench.speed.watch import Pass, RunError, watching
from paddlewheel.deploy.bench.speed.workload import Workload
from paddlewheel.pserver.config import TableConfig

WORK = Workload(rows=1200, num_slots=4, ids_per_slot=200, num_dense=3, num_files=2, width=4, tower=(8,))


def options(directory: Path, **changes: object) -> runs.Options:
    return runs.Options(WORK, **({"repeat": 1, "passes": 2, "threads": 1, "work_directory": directory} | changes))  # type: ignore[arg-type]


def check_agreement(report: Report, directory: Path) -> dict[str, dict[str, object]]:
    """What was written: JSON and table name the same cases with the same figures."""
    report.write(directory)
    cases = {case["name"]: case for case in json.loads((directory / "results.json").read_text())["cases"]}
    table = {}
    for line in (directory / "results.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 4 and cells[0] in cases:
            table[cells[0]] = float(cells[1].replace(",", ""))
    assert table.keys() == cases.keys()
    for name, case in cases.items():
        assert case["values"]
        assert all(value > 0 for value in case["values"])
        assert table[name] == pytest.approx(case["median"], rel=0.01)
    return cases


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train_runs_ours_next_to_paddles_own_path(tmp_path: Path) -> None:
    said: list[str] = []
    report = asyncio.run(
        runs.train(
            options(tmp_path / "work"),
            batches=[128],
            only=["paddlewheel", "paddle-fleet"],
            servers=1,
            trainers=1,
            torch_python=None,
            ceilings=True,
            say=said.append,
        )
    )
    cases = check_agreement(report, tmp_path)
    assert [case["params"]["system"] for case in cases.values()] == [
        "paddlewheel",
        "paddle-fleet",
        "read alone",
        "exchange alone",
        "dense alone",
    ]
    for system in ("paddlewheel", "paddle-fleet"):
        facts = cases[f"{system}, batch 128"]["facts"]
        assert {"server_CPU_s/M", "trainer_CPU_s/M", "server_peak_MiB", "trainer_peak_MiB"} <= facts.keys()
        assert facts["server_peak_MiB"][0] > 50
    assert [ratio.name for ratio in report.ratios] == ["paddlewheel, batch 128 / paddle-fleet, batch 128"]
    assert any(re.match(r"Ceilings of paddlewheel at batch 128 .* The lowest is ", note) for note in report.notes)
    assert len(said) == len(cases)
    assert [path.name[:5] for path in (tmp_path / "work").iterdir()] == ["rows-"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scaling_adds_trainers(tmp_path: Path) -> None:
    measuring = runs.scaling(
        options(tmp_path / "work"), batch_rows=128, trainers=[2], servers=[2], say=lambda line: None
    )
    report = asyncio.run(measuring)
    cases = check_agreement(report, tmp_path)
    assert any(note.startswith("Forecast, not measured") for note in report.notes)
    facts = cases["2 trainers, 2 servers"]["facts"]
    assert facts["servers_per_trainer"][0] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ps_and_dense(tmp_path: Path) -> None:
    measuring = runs.ps(
        options(tmp_path / "work"),
        keys_per_pass=3000,
        keys_per_call=[300],
        widths=[4],
        servers=[2],
        num_keys=1000,
        say=lambda line: None,
    )
    cases = check_agreement(asyncio.run(measuring), tmp_path / "ps")
    assert list(cases) == [
        f"{operation} 300 keys x 4, {where}" for operation in ("pull", "push") for where in ("2 servers", "loopback")
    ]
    report = asyncio.run(
        runs.dense(options(tmp_path / "work", repeat=2), batches=[100], threads=[1], say=lambda line: None)
    )
    assert [len(case.values) for case in report.cases] == [2, 2, 2, 2]
    cases = check_agreement(report, tmp_path / "dense")
    assert [name.partition(",")[0] for name in cases] == ["dense", "dense float32", "dense paddle", "matmul"]
    assert cases["dense, batch 100, 1 thread"]["facts"]["GFLOP/s"][0] > 0


def test_a_failing_program_is_told_with_its_log(tmp_path: Path) -> None:
    async def run() -> None:
        async with watching(tmp_path) as watch:
            await watch.start("server", [sys.executable, "-c", "import time; time.sleep(600)"], name="other")
            await watch.start("trainer", [sys.executable, "-c", "raise SystemExit('the reason')"], name="broken")
            await watch.finish("broken", seconds=60)

    with pytest.raises(RunError, match=r"broken exited with code 1\n.*the reason"):
        asyncio.run(run())


def test_a_peer_that_fails_ends_the_run_and_slow_ones_too(tmp_path: Path) -> None:
    async def run(code: str, seconds: float) -> None:
        async with watching(tmp_path) as watch:
            await watch.start("server", [sys.executable, "-c", code], name="server")
            await watch.start("trainer", [sys.executable, "-c", "import time; time.sleep(600)"], name="trainer")
            await watch.finish("trainer", seconds=seconds)

    with pytest.raises(RunError, match="server exited with code 3"):
        asyncio.run(run("raise SystemExit(3)", 60))
    with pytest.raises(RunError, match="trainer took longer than"):
        asyncio.run(run("import time; time.sleep(600)", 0.5))


def test_cpu_and_memory_are_those_of_each_role_and_its_descendants(tmp_path: Path) -> None:
    spin = "import time, sys\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\n"
    parent = f"import subprocess, sys\nb = bytearray(64 << 20)\nsubprocess.run([sys.executable, '-c', {spin!r}])\n"

    async def run() -> tuple[dict[str, float], dict[str, int]]:
        async with watching(tmp_path) as watch:
            started = time.monotonic()
            await watch.start("trainer", [sys.executable, "-c", parent + "import time; time.sleep(0.5)"])
            await watch.start("server", [sys.executable, "-c", "import time; time.sleep(600)"])
            await watch.finish("trainer", seconds=60)
            return watch.cpu_seconds([Pass(1, started, time.monotonic())]), watch.peak_bytes

    used, peak = asyncio.run(run())
    assert 0.3 < used["trainer"] < 2.0
    assert used["server"] < 0.3
    assert peak["trainer"] > 64 << 20 > peak["server"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_leaves_nothing(
    tmp_path: Path, eventually: Callable[..., None], number: signal.Signals, code: int
) -> None:
    work = tmp_path / "work"
    command = [
        sys.executable,
        "-m",
        "paddlewheel.deploy.cli",
        "bench",
        "train",
        "--rows",
        "2000",
        "--only",
        "paddlewheel",
    ]
    with subprocess.Popen([*command, "--work", str(work)], stderr=subprocess.PIPE, text=True) as bench:
        children = psutil.Process(bench.pid).children
        eventually(lambda: len(children(recursive=True)) >= 4, seconds=60, what="the job's processes")
        bench.send_signal(number)
        bench.communicate(timeout=30)
        assert bench.returncode == code
    assert [path.name[:5] for path in work.iterdir()] == ["rows-"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--torch-python", "/bin/false"], "--torch-python /bin/false: it failed"),
        (["train", "--torch-python", "/no/such/python"], "--torch-python /no/such/python: "),
        (["train", "--only", "torch-bf16"], "nothing to run: torch-bf16 needs --torch-python"),
        (["train", "--env", "oops"], "--env oops: write NAME=VALUE"),
        (["train", "--passes", "1"], "--passes"),
        (["ps", "--keys", "2000", "--table-keys", "1k"], "--keys 2000: a call cannot have more keys"),
        (["compare", "/no/such/folder", "/no/such/folder"], "no benchmark report"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", *words]) == 64
    assert message in capsys.readouterr().err


def test_environment_reaches_every_process(tmp_path: Path) -> None:
    planned = options(tmp_path, environment={"A_VARIABLE": "here"}).setting()

    async def run() -> str:
        async with watching(tmp_path) as watch:
            code = "import os; print(os.environ['A_VARIABLE'])"
            await watch.start("trainer", [sys.executable, "-c", code], environment=planned.environment)
            await watch.finish("trainer", seconds=60)
            return watch.log("trainer").read_text()

    assert asyncio.run(run()) == "here\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tables_as_they_grow(tmp_path: Path) -> None:
    report = tables.tables(
        sizes=[6000, 2000],
        num_servers=2,
        config=TableConfig(width=4),
        engines=["paddle"],
        work_directory=tmp_path,
        projected_keys=10**10,
        nodes=tables.Nodes(),
        seed=1,
        say=lambda line: None,
    )
    cases = check_agreement(report, tmp_path / "out")
    assert len(cases) == 2 * 8
    assert list(cases)[:2] == ["paddle: insert, 2,000 keys", "paddle: insert, 6,000 keys"]
    assert 50 < cases["paddle: save, 6,000 keys"]["facts"]["bytes/key"][0] < 400
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
