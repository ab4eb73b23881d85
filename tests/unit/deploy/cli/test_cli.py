"""The command line: quick help, exit codes, and errors in words."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from cyclopts import App

import paddlewheel.deploy.cli
from paddlewheel.deploy.cli import run
from tests.support.plans import record

HEAVY = ("paddle", "pyarrow", "grpc", "pandas", "pydantic", "numpy")
HELP = [
    ["--help"],
    ["train", "--help"],
    ["evaluate", "--help"],
    ["job", "--help"],
    ["job", "show", "--help"],
    ["data", "--help"],
    ["data", "prepare", "--help"],
    ["checkpoint", "--help"],
    ["doctor", "--help"],
]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.cli", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from paddlewheel.deploy.cli import run; code = run({arguments!r}); "
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]; "
        "print(heavy, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "Usage: paddlewheel" in done.stdout


def test_help_loads_nothing_that_is_slow_to_load() -> None:
    heavy = ("grpc", "matplotlib", "numpy", "paddle", "pandas", "pyarrow", "pydantic")
    code = (
        "import sys; from paddlewheel.deploy.cli import run; assert run(['--help']) == 0;"
        f"print(sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_every_command_exists_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in paddlewheel.deploy.cli._COMMANDS:
        assert run([name, "--help"]) == 0
        assert f"Usage: paddlewheel {name}" in capsys.readouterr().out


def commands(app: App, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    """Every command that does something, and its function."""
    for name in app:
        if name.startswith("-"):
            continue
        inner = app[name]
        if inner.default_command is not None:
            yield (*words, name), inner.default_command
        yield from commands(inner, (*words, name))


def test_help_swallows_nothing_in_angle_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for words, function in commands(paddlewheel.deploy.cli.build_app()):
        texts = [inspect.getdoc(function) or ""]
        for hint in get_type_hints(function, include_extras=True).values():
            texts += [part.help for part in getattr(hint, "__metadata__", ()) if getattr(part, "help", None)]
        assert run([*words, "--help"]) == 0
        shown = capsys.readouterr().out
        for placeholder in re.findall(r"[\w-]*<[^<>\s]*>", " ".join(texts)):
            found += 1
            assert placeholder in shown, words
    assert found > 5


def test_the_help_of_a_command_is_all_that_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "nothing is changed or created there" in " ".join(shown.split())
    assert run(["--help"]) == 0
    assert "Score Parquet files with a trained model." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "x.yaml"], ["trian"]),
        (["train"], ["JOB", "Try: paddlewheel train --help"]),
        (["train", "x.yaml", "--nope"], ["--nope", "Try: paddlewheel train --help"]),
        (["job", "nope"], ["nope", "schema", "Try: paddlewheel job --help"]),
        (["train", "no-such.yaml"], ["no-such.yaml", "there is no such job file"]),
        (["checkpoint", "ls", "/no/such/folder"], ["/no/such/folder", "no committed checkpoint"]),
    ],
    ids=" ".join,
)
def test_a_mistake_of_the_user_is_64_and_said_in_words(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 64
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("paddlewheel: ")
    assert "Traceback" not in told.err
    for word in words:
        assert word.lower() in told.err.lower()


def test_errors_are_json_with_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "show", "no-such.yaml", "--json"]) == 64
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"]) == ("ConfigError", 64)
    assert "no-such.yaml" in error["message"]


def test_a_mistake_of_ours_is_75_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("paddlewheel.deploy.cli.doctor.version", broken)
    assert run(["version"]) == 75
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "mistake in paddlewheel" in told


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paddlewheel.deploy.cli.doctor.version", interrupted)
    assert run(["version"]) == 130


def test_a_lost_peer_is_75(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from paddlewheel.pserver.errors import PullError

    def lost() -> None:
        raise PullError("server 1 did not answer")

    monkeypatch.setattr("paddlewheel.deploy.cli.doctor.version", lost)
    assert run(["version"]) == 75
    told = capsys.readouterr().err
    assert told == "paddlewheel: server 1 did not answer\n"


@pytest.mark.needs("bash")
def test_output_into_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m paddlewheel.deploy.cli job schema | head -n 1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _bash(line: str) -> subprocess.CompletedProcess[str]:
    line = f'set -o pipefail; paddlewheel() {{ {sys.executable} -m paddlewheel.deploy.cli "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)


def test_an_answer_that_a_full_disk_does_not_take_is_said_and_is_75() -> None:
    for command in ("version", "version --json", "job schema"):
        done = _bash(f"paddlewheel {command} > /dev/full")
        assert done.returncode == 75, done
        assert "standard output: No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


def test_errors_that_nobody_reads_keep_their_exit_code() -> None:
    assert _bash("paddlewheel train no-such.yaml 2>/dev/full").returncode == 64
    assert _bash("paddlewheel train no-such.yaml --json 2>&1 | true").returncode == 64


def test_a_closed_pipe_does_not_make_a_refutation_a_proof(tmp_path: Path) -> None:
    """`report | head` has the exit code of the report."""
    from paddlewheel.trainer.coordinator.journal import Journal

    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(record("run"))
    journal.close()
    assert _bash(f"paddlewheel report {tmp_path} | true").returncode == 64


@pytest.mark.parametrize(("command", "code"), [("version", 0), ("train", 75), ("predict", 75)])
def test_a_broken_connection_is_success_only_where_an_answer_was_all(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("paddlewheel.deploy.cli.build_app", lambda *_: broken)
    monkeypatch.setattr("paddlewheel.deploy.cli.give_up", lambda _: None)
    assert run([command]) == code


def test_schema_is_json_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["job", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "heartbeat" in json.dumps(schema)
    assert schema["properties"]["run_dir"]["description"]


def test_show_spells_out_defaults_and_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\ndata: {train: t, labels: [y], sparse: [{name: a}]}\n")
    assert run(["job", "show", str(path), "--set", "cluster.servers=3", "--set", "seed=5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["cluster"]["servers"], shown["seed"], shown["cluster"]["trainers"]) == (3, 5, 1)


def test_version_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert {"python", "paddlewheel", "protobuf", "grpcio", "pyarrow"} <= versions.keys()


def test_ready_job_files_can_be_read(request: pytest.FixtureRequest) -> None:
    from paddlewheel.trainer.job.config import JobConfig

    files = sorted((request.config.rootpath / "jobs").glob("*.yaml"))
    assert files
    for file in files:
        assert JobConfig.load(file).name == file.stem
