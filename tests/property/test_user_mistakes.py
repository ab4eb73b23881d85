"""Whatever a user types or writes into a job file: an answer, or a sentence with exit code 64. Never "a mistake in
paddlewheel", and never a job that starts and ends in a crash.

Commands run in this process. Those that would start processes stop where a job would start.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import Self

from paddlewheel.data_pipeline import DataError, synthetic
from paddlewheel.deploy.checks import preflight
from paddlewheel.deploy.checks.model_check import num_floats
from paddlewheel.deploy.cli import run
from paddlewheel.deploy.launch.outcome import RunOutcome
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError, Problem

ODD = (
    *("", " ", "-", "--", ",", ":", "::", "=", "'", '"', "{", "[", "{a: 1}", "[x]", "*", "?", "~", "%", "\n", "é"),
    *("0", "-1", "1", "1.5", "1e400", "nan", "inf", "99999999999999999999999", "true", "null", "None", "x", "a b", "²"),
    *("/", ".", "..", "/dev/null", "/dev/null/x", "/no/such/place", "/etc/hostname", "/proc/self/mem", "a" * 5000),
    *("s3:///x", "s4://x", "file:///x", "://", "\udcff", "step-1", "step-x", "2026-01-05..2026-01-01", "a=b"),
    *("1..2", "--json", "--help", "-x", "--nope", "@x", "1:2", "localhost:1", "a:b:c", "[::1]:1", "127.0.0.1:99999"),
)

COMMANDS = (
    "train JOB",
    "train JOB --days 2026-01-01..2026-01-07 --skip-missing-days",
    "train JOB --hosts HOSTS --print-commands",
    "train JOB --resume",
    "evaluate JOB",
    "evaluate JOB --checkpoint EMPTY/step-3",
    "export JOB --to NEW",
    "export EMPTY --to NEW --checkpoint EMPTY/step-1 --dtype int8",
    "predict JOB --to NEW --data DATA/eval --columns user",
    "predict --export EMPTY --to NEW --lookup EMPTY",
    "predict JOB --to NEW --coordinator 127.0.0.1:1",
    "job check JOB --set cluster.servers=2",
    "job show JOB --set train.epochs=2 --json",
    "job schema",
    "model ls",
    "model summary JOB --set data.batch_rows=8",
    "data synth NEW --rows 50 --seed 3 --eval-fraction 0.3 --days 2026-01-01..2026-01-02",
    "data check JOB --sample-rows 100 --out NEW --server-memory-gb 4",
    "data fit JOB",
    "data prepare csv CSV NEW --schema click:int8,user:int64 --delimiter , --list-delimiter |",
    "data prepare criteo CSV NEW --split order --train-rows 3",
    "data prepare avazu CSV NEW --seed 1",
    "data prepare movielens EMPTY NEW --max-history 5",
    "checkpoint ls EMPTY",
    "checkpoint verify EMPTY/step-5",
    "checkpoint diff EMPTY/step-1 EMPTY/step-2",
    "checkpoint prune EMPTY --keep 2",
    "checkpoint reshard EMPTY/step-1 NEW --shards 3",
    "checkpoint fetch EMPTY/step-1 NEW/step-1",
    "deltas ls EMPTY",
    "deltas apply EMPTY --to NEW --day 2026-01-01",
    "plot EMPTY NEW",
    "report EMPTY",
    "deploy k8s JOB --image x --keys default=3m --server-memory 4Gi --out NEW --node-selector a=b --gpus 1",
    "tune JOB SPACE --out /dev/null --trials 1",
    "bench compare CSV CSV",
    "bench train --rows 0",
    "bench tables --keys 0",
    "role coordinator JOB --listen localhost:x",
    "gpu build --arch 10",
    "version",
)


HOSTS = {"coordinator": "127.0.0.1", "hosts": [{"name": "a", "address": "127.0.0.1", "servers": 1, "trainers": 2}]}
SPACE = {"train.dense_optimizer.learning_rate": {"low": 0.001, "high": 0.1, "log": True}, "seed": {"choices": [1, 2]}}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with one of everything; the working directory meanwhile, so that a path without a folder lands in it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        synthetic.generate(folder / "data", 300, seed=1)
        (folder / "empty").mkdir()
        (folder / "rows.csv").write_text("click,user\n1,2\n0,3\n1,4\n0,5\n")
        (folder / "hosts.yaml").write_text(yaml.safe_dump(HOSTS))
        (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
        (folder / "job.yaml").write_text(yaml.safe_dump(job(folder)))
        yield folder
        os.chdir(before)


def job(folder: Path) -> dict[str, Any]:
    return {
        "name": "small",
        "run_dir": str(folder / "run"),
        "data": {**synthetic.data_section(folder / "data"), "batch_rows": 16, "threads": 0},
        "tables": {"default": {"width": 4, "optimizer": {"rule": "adam"}}},
        "model": {"kind": "dcn", "tower": [8]},
        "train": {"epochs": 1, "evaluation": {"every_steps": 50}},
        "cluster": {"servers": 1, "trainers": 2},
        "checkpoint": {"every_minutes": 5},
        "metrics": {"enabled": False},
        "control": {"step_timeout_seconds": 60},
    }


class InProcess:
    """Builds the model here, and once: a process for each of a few hundred jobs would take minutes."""

    known: ClassVar[dict[str, str]] = {}

    def __init__(self, job: JobConfig, *, here: bool = True) -> None:
        self._job = job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        whole = self._job.model_dump(mode="json")
        shape = [whole["model"], whole["tables"], [whole["data"][key] for key in ("labels", "dense", "sparse")]]
        key = json.dumps(shape)
        if key not in self.known:
            self.known[key] = ""
            try:
                num_floats(self._job)
            except ValueError as error:
                self.known[key] = str(error)
        if self.known[key]:
            raise ConfigError(self._job.name, [Problem("model", self.known[key])])


@pytest.fixture(scope="module", autouse=True)
def nothing_starts() -> Iterator[None]:
    def stopped(job: JobConfig, *_: Any, **__: Any) -> RunOutcome:
        return RunOutcome(0, "", "", "", {}, Path(job.run_dir), Path(job.run_dir), 0.0, 0, {})

    def refused(*_: Any, **__: Any) -> None:
        raise DataError("paddlewheel would begin")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddlewheel.deploy.launch.launcher.run_local", stopped)
        patch.setattr(preflight, "ModelCheck", InProcess)
        for where in (
            "paddlewheel.deploy.bench.recovery.drill",
            "paddlewheel.trainer.agent.agent.run_agent",
        ):
            patch.setattr(where, lambda *_, **__: pytest.fail("something was started"))
        for where in (
            "paddlewheel.trainer.coordinator.service.serve",
            "paddlewheel.deploy.bench.speed.runs.train",
            "paddlewheel.deploy.bench.speed.tables.tables",
            "paddlewheel.deploy.bench.tuning.run",
        ):
            patch.setattr(where, refused)  # with what is left of the arguments a measurement or search would begin
        yield


def told(arguments: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return code, err.getvalue()


def assert_answered(arguments: list[str], *, done: tuple[int, ...] = (0, 1, 3)) -> None:
    code, said = told(arguments)
    assert "mistake in paddlewheel" not in said, said
    assert "Traceback" not in said, said
    if code == 75:  # only where somebody else did not answer, or a disk failed, and then with the file's name
        failed_read = "/proc/self/mem: Input/output error" in said
        assert failed_read or arguments[0] in {"status", "predict"} or "create" in arguments, said
    elif code not in done:
        assert code == 64, (code, said)
        assert arguments[:1] == ["checkpoint"] or arguments[:1] == ["report"] or "paddlewheel: " in said, said


def filled(words: list[str], folder: Path, number: int) -> list[str]:
    names = {
        "JOB": "job.yaml", "EMPTY": "empty", "DATA": "data", "CSV": "rows.csv", "HOSTS": "hosts.yaml",
        "SPACE": "space.yaml", "NEW": f"new-{number}",
    }  # fmt: skip
    return [
        next((word.replace(key, str(folder / name)) for key, name in names.items() if word.startswith(key)), word)
        for word in words
    ]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(command=st.sampled_from(COMMANDS), seed=st.integers(0, 2**32))
def test_a_command_line_with_a_mistake_is_answered(place: Path, command: str, seed: int) -> None:
    mistaken_command(place, command, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(command=st.sampled_from(COMMANDS), seed=st.integers(0, 2**32))
def test_thousands_of_command_lines_with_a_mistake_are_answered(place: Path, command: str, seed: int) -> None:
    mistaken_command(place, command, seed)


def mistaken_command(place: Path, command: str, seed: int) -> None:
    dice = random.Random(seed)
    words = filled(command.split(" "), place, seed)
    for _ in range(dice.randint(1, 2)):
        at = dice.randrange(1, len(words)) if len(words) > 1 else 0
        kind = dice.randrange(5)
        if kind == 0:
            words.insert(at, dice.choice(ODD))
        elif kind == 1 and len(words) > 1:
            del words[at]
        elif kind == 2:
            words += ["--set", f"{dice.choice(list(KEYS))}={dice.choice(ODD)}"]
        else:
            words[at] = dice.choice(ODD)
    assert_answered(words)


KEYS = (
    "name", "seed", "run_dir", "data", "data.train", "data.eval", "data.labels", "data.sparse", "data.sparse.0",
    "data.sparse.0.name", "data.dense", "data.dense.columns", "data.batch_rows", "tables", "tables.default",
    "tables.default.optimizer", "model", "model.kind", "model.tower", "train", "train.days", "train.days.range",
    "cluster", "cluster.bind_address", "cluster.server_ports", "cluster.coordinator_port", "checkpoint",
    "checkpoint.directory", "checkpoint.staging", "metrics", "metrics.address", "control", "warm_start",
    "warm_start.source", "data.group", "data.sample_weight", "data.slice_metrics_by", "x", "x.y.0",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 0.5, -0.5, 1e300, 1e-300, float("inf"), float("nan"), 2**31, 2**70),
    *("", " ", "x", "click", "user", "tags", "price", "default", "\0", "\ud800", "a\nb", "2026-01-01", "s3://", "."),
    *([], {}, [None], [[]], [{}], {"": 1}, {"a": {}}, ["a", "a"], [1, 2], {"name": "x"}, {"kind": "lr"}, {1: 2}, b"x"),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in inside for found in [(*path, key), *paths(inner, (*path, key))]]


def spoilt(raw: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *above, last = dice.choice(paths(raw))
    here: Any = raw
    for step in above:
        here = here[step]
    kind = dice.randrange(4)
    if kind == 0:
        del here[last]
    elif kind == 1 and isinstance(here, dict):
        key = dice.choice(("x", "", "kind", "name", "column", "cross", "max_length", "pooling", "table", *here))
        here[key] = dice.choice(VALUES)
    elif kind == 2 and isinstance(here, list):
        here.append(copy.deepcopy(here[last]))
    else:
        here[last] = dice.choice(VALUES)
    return raw


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_job_file_with_a_mistake_is_answered(place: Path, seed: int) -> None:
    mistaken_job(place, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_thousand_job_files_with_a_mistake_are_answered(place: Path, seed: int) -> None:
    mistaken_job(place, seed)


def mistaken_job(place: Path, seed: int) -> None:
    dice = random.Random(seed)
    raw = spoilt(job(place), dice)
    if dice.random() < 0.3:
        raw = spoilt(raw, dice)
    path = place / "spoilt.yaml"
    with contextlib.suppress(yaml.representer.RepresenterError, UnicodeEncodeError):
        path.write_text(yaml.dump(raw))
        assert_answered(["job", "check", str(path)])


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_job_file_with_a_typing_slip_is_answered(place: Path, seed: int) -> None:
    dice = random.Random(seed)
    text = (place / "job.yaml").read_text()
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(text))
        put = dice.choice("\t\n :-[]{}&*!|>'\"%@`#?,0x\u00e9\x00\x1b") * dice.choice((0, 1, 1, 2))
        text = text[:at] + put + text[at + dice.choice((0, 1)) :]
    path = place / "slip.yaml"
    path.write_text(text)
    assert_answered(["job", "show", str(path)])


@pytest.mark.parametrize(
    ("raw", "name", "command"),
    [
        (HOSTS, "hosts.yaml", "train JOB --hosts FILE --print-commands"),
        (SPACE, "space.yaml", "tune JOB FILE --out /dev/null"),
    ],
    ids=["hosts", "space"],
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_host_or_search_file_with_a_mistake_is_answered(
    place: Path, raw: dict[str, Any], name: str, command: str, seed: int
) -> None:
    path = place / f"spoilt-{name}"
    with contextlib.suppress(yaml.representer.RepresenterError, UnicodeEncodeError):
        path.write_text(yaml.dump(spoilt(raw, random.Random(seed))))
        assert_answered([str(path) if word == "FILE" else word for word in filled(command.split(), place, seed)])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_odd_value_in_every_place(place: Path, command: str) -> None:
    dice = random.Random(command)
    words = filled(command.split(" "), place, 0)
    for at in range(1, len(words)):
        for value in dice.sample(ODD, 2):
            assert_answered([*words[:at], value, *words[at + 1 :]])


def test_an_argument_that_is_no_text_is_refused() -> None:
    code, said = told(["data", "prepare", "csv", "rows.csv", "new-\udcff", "--schema", "click:int8"])
    assert (code, said) == (64, "paddlewheel: the argument 'new-\\udcff' is no UTF-8: rename what it names\n")
