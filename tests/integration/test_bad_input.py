"""What a user can get wrong is refused with exit code 64 before any process starts, and the message says what to do."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from paddlewheel.data_pipeline import native as encoder
from paddlewheel.data_pipeline import synthetic
from paddlewheel.deploy.cli import run
from tests.unit.deploy.checks.test_model_check import OWN_MODEL


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    synthetic.generate(folder, 2_000, seed=1)
    return folder


class Job:
    """A job that could run, to be spoilt."""

    def __init__(self, folder: Path, clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.data = folder / "clicks"
        shutil.copytree(clicks, self.data)
        self.raw: dict[str, Any] = {
            "name": "spoilt",
            "run_dir": str(folder / "run"),
            "data": synthetic.data_section(self.data),
            "tables": {"default": {"width": 4}},
            "model": {"kind": "deepfm", "tower": [8]},
        }

    def refusal(self, *arguments: str, command: str = "train") -> str:
        """Runs the command; what it says on its way out with 64."""
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self.raw))
        code = run([command, str(path), *arguments])
        told = self.capsys.readouterr()
        assert (code, told.out) == (64, ""), told.err
        assert "Traceback" not in told.err
        assert not (self.folder / "run").exists(), "something was started"
        return told.err

    def rewrite(self, part: str, change: Any) -> Path:
        """Replaces the first file of a part by what `change` makes of its table."""
        file = min((self.data / part).glob("*.parquet"))
        pq.write_table(change(pq.read_table(file)), file)
        return file


@pytest.fixture
def job(tmp_path: Path, clicks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Job:
    def started(*_: Any, **__: Any) -> None:
        pytest.fail("the job was started")

    monkeypatch.setattr("paddlewheel.deploy.launch.launcher.run_local", started)
    return Job(tmp_path, clicks, capsys)


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message


@pytest.mark.parametrize("part", ["train", "eval"])
def test_missing_path(job: Job, part: str) -> None:
    job.raw["data"][part] = str(job.folder / "nowhere")
    assert_says(job.refusal(), str(job.folder / "nowhere"))


def test_empty_folder(job: Job) -> None:
    shutil.rmtree(job.data / "train")
    (job.data / "train").mkdir()
    assert_says(job.refusal(), str(job.data / "train"))


def test_pattern_that_matches_nothing(job: Job) -> None:
    job.raw["data"]["train"] = str(job.data / "train" / "*.parq")
    assert_says(job.refusal(), "*.parq")


def test_no_training_data_named(job: Job) -> None:
    del job.raw["data"]["train"]
    assert_says(job.refusal(), "data.train", "is empty")


def test_misspelt_column(job: Job) -> None:
    job.raw["data"]["sparse"][1] = {"name": "item", "column": "itm"}
    assert_says(job.refusal(), "itm", "item")


def test_column_missing_in_one_file(job: Job) -> None:
    file = job.rewrite("train", lambda table: table.drop_columns(["site"]))
    assert_says(job.refusal(), file.name, "site")


def test_wrong_column_type(job: Job) -> None:
    file = job.rewrite(
        "train",
        lambda table: table.set_column(table.column_names.index("price"), "price", pa.array(["x"] * len(table))),
    )
    assert_says(job.refusal(), file.name, "price", "string")


def test_list_column_used_as_single_valued(job: Job) -> None:
    job.raw["data"]["sparse"][-1] = {"name": "tags"}
    assert_says(job.refusal(), "tags", "max_length")


@pytest.mark.parametrize("value", [2, -1])
def test_label_outside_0_and_1(job: Job, value: int) -> None:
    def spoil(table: pa.Table) -> pa.Table:
        labels = table.column("click").to_pylist()
        labels[3] = value
        return table.set_column(0, "click", pa.array(labels, pa.int8()))

    file = job.rewrite("train", spoil)
    assert_says(job.refusal(), "click", str(value), file.name)


def test_file_that_is_no_parquet(job: Job) -> None:
    file = min((job.data / "train").glob("*.parquet"))
    file.write_text("user,item,click\n1,2,0\n")
    assert_says(job.refusal(), file.name, "Parquet")


def test_unknown_model(job: Job) -> None:
    job.raw["model"]["kind"] = "depfm"
    assert_says(job.refusal(), "model.kind", "'depfm'", "deepfm")


def test_no_servers(job: Job) -> None:
    assert_says(job.refusal("--set", "cluster.servers=0"), "cluster.servers", "got 0", "greater than or equal to 1")


@pytest.mark.parametrize("key", ["cluster.server_ports", "cluster.coordinator_port"])
def test_taken_port(job: Job, key: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        value = f"[{port}]" if key.endswith("ports") else str(port)
        assert_says(job.refusal("--set", f"{key}={value}"), f"port {port}", "choose another port")


def _pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions[name] if name in versions else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("version", ["3.0.0", "2.5.2"])
def test_wrong_paddle(job: Job, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _pretend(monkeypatch, {"paddlepaddle": version})
    assert_says(job.refusal(), version, "pip install paddlepaddle==2.6.2")


def test_no_paddle(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {"paddlepaddle": None})
    assert_says(job.refusal(), "not installed", "pip install paddlepaddle==2.6.2")


def test_protobuf_7(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {"protobuf": "7.36.2"})
    assert_says(job.refusal(), "protobuf 7.36.2", "<7")


AVX2 = 0x7  # what oneDNN says of a processor with neither AVX512-BF16 nor AMX


@pytest.mark.parametrize("operators", ["auto", "native"])
def test_bfloat16_on_a_processor_without_it(job: Job, monkeypatch: pytest.MonkeyPatch, operators: str) -> None:
    monkeypatch.setattr("paddlewheel.trainer.kernels.cpu._instructions", lambda: AVX2)
    job.raw["train"] = {"precision": "bfloat16", "cpu_backend": operators}
    assert_says(job.refusal(), "train.precision: bfloat16", "AVX512-BF16 or AMX", "Set train.precision to auto")
    path = job.folder / "job.yaml"
    assert run(["job", "check", str(path)]) == 64
    assert_says(job.capsys.readouterr().err, "train.precision: bfloat16", "Set train.precision to auto")
    # what it has learnt can be evaluated there, in float32: the refusal is another one
    assert_says(job.refusal(command="evaluate"), "no committed checkpoint")


def test_an_encoder_that_cannot_be_built(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddlewheel.data_pipeline.native._places", lambda: [job.folder / "none.so"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    encoder._loaded.cache_clear()
    try:
        job.raw["data"]["encoder_backend"] = "native"
        assert_says(job.refusal(), "data.encoder_backend: native", "no C++ compiler", "apt-get install g++")
    finally:
        encoder._loaded.cache_clear()


def test_operators_that_cannot_be_built(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddlewheel.trainer.kernels.cpu._places", lambda: [job.folder / "none.so"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    job.raw["train"] = {"cpu_backend": "native"}
    assert_says(job.refusal(), "train.cpu_backend: native", "no C++ compiler", "apt-get install g++")
    job.raw["train"] = {"cpu_backend": "auto"}
    path = job.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.raw))
    assert run(["job", "check", str(path)]) == 0


def test_evaluation_without_a_checkpoint(job: Job) -> None:
    assert_says(job.refusal(command="evaluate"), "no committed checkpoint", "paddlewheel train")


def test_check_says_the_same_without_training(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    path = job.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.raw))
    assert run(["job", "check", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["train_rows"], found["eval_rows"]) == (1_600, 400)
    assert run(["job", "check", str(path), "--set", "data.labels=[clik]"]) == 64
    assert "click" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the model, the folders, the checkpoint


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"kind": "din"}, ["no feature has `pooling: none`"]),
        ({"kind": "mymodels:Net"}, ["model.kind 'mymodels:Net' cannot be had", "No module named 'mymodels'"]),
        ({"kind": "deepfm", "tower": [1_000_000_000, 1000]}, ["dense parameters need", "take smaller layers"]),
    ],
    ids=["din", "own", "huge"],
)
def test_a_model_that_cannot_be_built(job: Job, model: dict[str, Any], words: list[str]) -> None:
    job.raw["model"] = model  # tests/unit/deploy/checks/test_model_check.py has the other ways
    assert_says(job.refusal(), "spoilt: 1 problem", *words)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("sys.exit(3)", "SystemExit"),
        ("os._exit(9)", "ended with exit code 9"),
        ("pass", "has no attribute"),
    ],
)
def test_a_users_module_that_does_something_else(
    job: Job, monkeypatch: pytest.MonkeyPatch, ending: str, words: str
) -> None:
    (job.folder / "mymodels.py").write_text(f"import os, sys\nprint('hello')\n{ending}\n")
    monkeypatch.chdir(job.folder)
    job.raw["model"] = {"kind": "mymodels:Net"}
    assert_says(job.refusal(), words)


def test_a_users_own_model_in_the_working_directory_passes(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.folder / "mymodels.py").write_text(OWN_MODEL)
    monkeypatch.chdir(job.folder)
    job.raw["model"] = {"kind": "mymodels:Net", "options": {"units": 1}}
    job.raw["tables"]["default"]["first_order"] = False
    (job.folder / "job.yaml").write_text(yaml.safe_dump(job.raw))
    assert run(["job", "check", "job.yaml"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith("spoilt can run: 1,600 training rows")


def test_a_run_folder_that_is_a_file_or_below_one(job: Job) -> None:
    for place in ("/etc/hostname", "/etc/hostname/x", "/dev/null/x"):
        job.raw["run_dir"] = place
        assert_says(job.refusal(), f"run_dir: {'/dev/null' if 'null' in place else '/etc/hostname'} is a file")


def test_a_run_folder_that_cannot_be_made(job: Job) -> None:
    for place in ("/proc/x", "/sys/x", str(job.folder / ("a" * 300))):
        job.raw["run_dir"] = place
        assert_says(job.refusal(), "run_dir: ", "cannot be written to")
    (job.folder / "link").symlink_to(job.folder / "nowhere")
    job.raw["run_dir"] = str(job.folder / "link")
    assert_says(job.refusal(), "run_dir: ", "is a link to nothing")


@pytest.mark.needs("an ordinary user")
def test_a_run_folder_without_permission(job: Job) -> None:
    (job.folder / "locked").mkdir(mode=0o500)
    job.raw["run_dir"] = str(job.folder / "locked" / "run")
    assert_says(job.refusal(), "run_dir: ", "cannot be written to")


@pytest.mark.parametrize(
    "key", ["checkpoint.directory", "metrics.prometheus_sd_directory", "data.quarantine_directory"]
)
def test_other_folders_that_a_job_writes_to(job: Job, key: str) -> None:
    assert_says(job.refusal("--set", f"{key}=/etc/hostname"), f"{key}: /etc/hostname is a file")


def test_looking_at_folders_leaves_nothing_behind(job: Job) -> None:
    before = sorted(job.folder.rglob("*"))
    assert_says(job.refusal("--set", "data.labels=[clik]"), "click")
    assert [path for path in sorted(job.folder.rglob("*")) if path.name != "job.yaml"] == before


def test_a_wrong_checkpoint_to_evaluate_is_told_before_anything_starts(job: Job) -> None:
    (job.folder / "empty").mkdir()
    message = job.refusal("--checkpoint", str(job.folder / "empty"), command="evaluate")
    assert_says(message, "--checkpoint", "is no checkpoint: name a step-<n> folder")
    message = job.refusal("--checkpoint", str(job.folder / "step-7"), command="evaluate")
    assert_says(message, "step-7 is no complete checkpoint", "MANIFEST.json")
