"""Exported models and predictions of real jobs: the same scores as training's evaluation, wherever they come from."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from paddlewheel.data_pipeline import synthetic
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.deploy.cli import run
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.loop.evaluate import evaluate
from paddlewheel.trainer.serving.export import dense_program
from paddlewheel.trainer.serving.running_job import find
from tests.integration.control.conftest import fixture_start_job  # noqa: F401 -- a fixture
from tests.integration.control.jobs import LONG
from tests.support.command import Job
from tests.support.export_reader import Reader

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
FRESH = """
import json, sys
import numpy as np, paddle
assert not {"trainer", "pserver", "data_pipeline", "deploy"} & set(sys.modules)
prefix, arrays = sys.argv[1], dict(np.load(sys.argv[2]))
paddle.enable_static()
executor = paddle.static.Executor(paddle.CPUPlace())
program, inputs, outputs = paddle.static.load_inference_model(prefix, executor)
static = executor.run(program, feed={name: arrays[name] for name in inputs}, fetch_list=outputs)
from paddle.inference import Config, create_predictor
predictor = create_predictor(Config(prefix + ".pdmodel", prefix + ".pdiparams"))
for name in predictor.get_input_names():
    predictor.get_input_handle(name).copy_from_cpu(arrays[name])
predictor.run()
inference = [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]
np.savez(sys.argv[3], log_odds=static[0], probability=static[1], inference=inference[1])
"""


def paddlewheel(*words: Any, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, (done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


def in_this_process(*words: Any, code: int = 0) -> dict[str, Any]:
    """The same for a command that starts no process and opens no client: Paddle is imported here already."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()) as errors:
        found = run([*map(str, words), "--json"])
    assert found == code, (told.getvalue()[-2000:], errors.getvalue()[-2000:])
    return json.loads(told.getvalue())


class Trained:
    """A job that was trained once, for all tests of this module."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.job = JobConfig.load(path)
        outcome = paddlewheel("train", path)
        self.result = outcome["result"]
        self.step = manifest.latest(Path(self.job.checkpoint_location))
        self.eval = self.job.data.eval[0]

    def evaluated(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Probabilities in the order of the file, and the report: by what `paddlewheel evaluate` runs."""
        job, found = self.job, []
        tables = {name: job.tables[name] for name in job.data.tables}

        class Recorder:
            def __init__(self, program):
                self.program = program

            def predict(self, batch, rows):
                found.append(self.program.predict(batch, rows))
                return found[-1]

        program = dense_program(job, tables, cpu.choose(job.train.cpu_backend, job.train.precision).precision)
        program.load_state(manifest.read(self.step).dense())
        with (
            local_servers(tables, 1, self.folder) as servers,
            Client(tables, servers.endpoints, seed=job.seed) as client,
        ):
            client.load(self.step / "sparse")
            data = Dataset.open(job.data.eval, job.data)
            with Loader(data, job.data, data.slices(), seed=0, epoch=0, training=False) as loader:
                sync = SingleGroup()
                report = evaluate(Recorder(program), client, sync, iter(loader), labels=job.data.labels)
        logit = np.concatenate(found).astype(np.float64)
        return 1 / (1 + np.exp(-logit)), report


def run_fresh(*arguments: Path) -> None:
    """The program in a process that has never heard of paddlewheel."""
    words = [sys.executable, "-I", "-c", FRESH, *map(str, arguments)]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def scores(path: Path, label: str) -> np.ndarray:
    return pq.read_table(path)[f"score_{label}"].to_numpy()


@pytest.fixture(scope="module")
def criteo(tmp_path_factory, shared_data) -> Trained:
    folder = tmp_path_factory.mktemp("criteo")
    source = shared_data / "criteo" / "criteo_sample.tsv.gz"
    prepared = [folder / "data", "--split", "permutation", "--seed", "0", "--train-rows", "12000"]
    words = [sys.executable, "-m", "paddlewheel.deploy.cli", "data", "prepare", "criteo", source, *prepared]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    job = yaml.safe_load((ROOT / "jobs" / "criteo-deepfm.yaml").read_text())
    job["data"] |= {"train": str(folder / "data" / "train"), "eval": str(folder / "data" / "eval")}
    job |= {"run_dir": str(folder / "run"), "train": {**job["train"], "epochs": 1}}
    job["cluster"] = {"servers": 2, "trainers": 1}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return Trained(folder, folder / "job.yaml")


@pytest.fixture(scope="module")
def said(criteo) -> dict[str, float]:
    """What `paddlewheel evaluate` says of the job."""
    return paddlewheel("evaluate", criteo.path)["result"]["eval"]


@pytest.fixture(scope="module")
def exported(criteo) -> Path:
    paddlewheel("export", criteo.path, "--to", criteo.folder / "export")
    return criteo.folder / "export"


def test_the_same_scores_from_everywhere(criteo, said, exported, tmp_path) -> None:
    expected, report = criteo.evaluated()
    in_this_process("predict", "--export", exported, "--to", tmp_path / "export.parquet", "--columns", "label")
    paddlewheel("predict", criteo.path, "--to", tmp_path / "servers.parquet", "--data", criteo.eval)
    labels = pq.read_table(tmp_path / "export.parquet")["label"].to_numpy()
    for source in ("export", "servers"):
        found = scores(tmp_path / f"{source}.parquet", "label").astype(np.float64)
        np.testing.assert_allclose(found, expected[:, 0], rtol=0, atol=1e-6)
        logloss = -np.mean(np.where(labels == 1, np.log(found), np.log1p(-found)))
        assert logloss == pytest.approx(said["logloss"], abs=1e-6)
        assert logloss == pytest.approx(report["logloss"], abs=1e-6)


def test_the_same_scores_from_a_running_jobs_servers(criteo, exported, start_job, eventually, tmp_path) -> None:
    """Servers and coordinator are real; trainers only keep the job running, and the test fills the servers."""
    tables = {name: criteo.job.tables[name] for name in criteo.job.data.tables}
    plain = {name: table.model_dump(mode="json") for name, table in tables.items()}
    job = start_job({"*": {**LONG, "step_timeout_seconds": 0.2}}, {"real_servers": True, "tables": plain})
    eventually(job.has("running"), seconds=60)
    predict = ["predict", criteo.path, "--coordinator", job.address(), "--to"]
    strange = paddlewheel(*predict, tmp_path / "no.parquet", code=64)["error"]["message"]
    assert "the servers of that job know 0" in strange
    running = find(job.address())
    with Client(tables, running.endpoints, seed=criteo.job.seed, server_uids=running.server_uids) as client:
        client.load(criteo.step / "sparse")
        before = client.num_keys()
        paddlewheel(*predict, tmp_path / "live.parquet")
        assert client.num_keys() == before  # unknown keys of data.eval were not created
    paddlewheel("predict", "--export", exported, "--to", tmp_path / "export.parquet", "--columns", "label")
    found, expected = (scores(tmp_path / f"{name}.parquet", "label") for name in ("live", "export"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    days = ["--set", "train.days.range=2026-01-01", "--set", "data.partitions=hive"]
    refused = paddlewheel(*predict, tmp_path / "no.parquet", *days, code=64)["error"]["message"]
    assert "this job has day boundaries (train.days)" in refused
    rows = ["--set", f"tables.{next(iter(tables))}.lifecycle.every_rows=1000000"]
    refused = paddlewheel(*predict, tmp_path / "no.parquet", *rows, code=64)["error"]["message"]
    assert "lifecycle.every_rows" in refused
    assert not (tmp_path / "no.parquet").exists()


def test_servers_that_may_be_loading_are_not_read(criteo, start_job, eventually, tmp_path) -> None:
    job = start_job({"*": LONG, "trainer 0": {"at": "loading", "do": "hang"}})
    eventually(job.has("attempt"), seconds=30)
    arguments = ["predict", criteo.path, "--coordinator", job.address(), "--to", tmp_path / "no.parquet"]
    said = paddlewheel(*arguments, code=75)["error"]["message"]
    assert "is not training" in said
    assert "may be loading" in said
    job.process.terminate()
    job.process.wait(60)
    gone = paddlewheel(*arguments, code=75)["error"]["message"]
    assert "no coordinator answers there" in gone


def test_the_program_runs_where_only_paddle_and_numpy_are(criteo, exported, tmp_path) -> None:
    rows = pq.read_table(criteo.eval).slice(0, 200).to_pylist()
    np.savez(tmp_path / "in.npz", **Reader(exported).arrays(rows))  # shares no code with the package
    run_fresh(exported / "dense" / "model", tmp_path / "in.npz", tmp_path / "out.npz")
    found = np.load(tmp_path / "out.npz")
    expected, _ = criteo.evaluated()
    np.testing.assert_allclose(found["probability"], expected[:200], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["inference"], expected[:200], rtol=0, atol=1e-6)
    np.testing.assert_allclose(1 / (1 + np.exp(-found["log_odds"])), expected[:200], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float16", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.slow), "int8"],
)
def test_smaller_types_say_what_they_cost(criteo, said, exported, tmp_path, dtype) -> None:
    told = in_this_process("export", criteo.step, "--to", tmp_path / "small", "--dtype", dtype)
    compared = told["comparison"]["label"]
    assert compared["float32"]["logloss"] == pytest.approx(said["logloss"], abs=1e-6)
    assert 0 < abs(compared[dtype]["logloss"] - said["logloss"]) < 1e-3
    assert compared[dtype]["auc"] == pytest.approx(said["auc"], abs=2e-3)
    in_this_process("predict", "--export", tmp_path / "small", "--to", tmp_path / "s.parquet", "--columns", "label")
    table = pq.read_table(tmp_path / "s.parquet")
    label, found = table["label"].to_numpy(), table["score_label"].to_numpy().astype(np.float64)
    logloss = -np.mean(np.where(label == 1, np.log(found), np.log1p(-found)))
    assert logloss == pytest.approx(compared[dtype]["logloss"], abs=1e-6)
    rows = pq.read_table(criteo.eval).slice(0, 50).to_pylist()
    arrays = Reader(tmp_path / "small").arrays(rows)
    np.savez(tmp_path / "i.npz", **arrays)
    run_fresh(tmp_path / "small/dense/model", tmp_path / "i.npz", tmp_path / "o.npz")
    np.testing.assert_allclose(np.load(tmp_path / "o.npz")["probability"][:, 0], found[:50], rtol=0, atol=1e-6)


def test_a_lookup_is_kept_and_belongs_to_its_export(criteo, exported, tmp_path) -> None:
    arguments = ["predict", "--export", exported, "--lookup", tmp_path / "lookup", "--to"]
    in_this_process(*arguments, tmp_path / "a.parquet")
    written = (tmp_path / "lookup" / "default" / "values.npy").stat().st_mtime_ns
    in_this_process(*arguments, tmp_path / "b.parquet")
    assert (tmp_path / "lookup" / "default" / "values.npy").stat().st_mtime_ns == written
    assert (scores(tmp_path / "a.parquet", "label") == scores(tmp_path / "b.parquet", "label")).all()
    in_this_process("export", criteo.path, "--to", tmp_path / "other", "--dtype", "int8", "--no-compare")
    arguments[2] = tmp_path / "other"
    assert (
        "is not a lookup of these tables"
        in in_this_process(*arguments, tmp_path / "c.parquet", code=64)["error"]["message"]
    )


def test_an_export_appears_whole_or_not_at_all(criteo, exported, tmp_path) -> None:
    again = in_this_process("export", criteo.path, "--to", exported, code=64)
    assert "exists already" in again["error"]["message"]
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", criteo.job.run_dir, copy], check=True)
    part = next((copy / "checkpoints" / criteo.step.name / "sparse" / "default").rglob("part-*-00007"))
    part.write_bytes(part.read_bytes().replace(b"1", b"2", 1))
    damaged = in_this_process("export", copy, "--to", tmp_path / "no", code=64)
    assert "damaged" in damaged["error"]["message"]
    other = in_this_process("export", criteo.path, "--to", tmp_path / "no", "--set", "model.tower=[128, 32]", code=64)
    assert "model.tower" in other["error"]["message"]
    twice = in_this_process("export", exported, "--to", tmp_path / "no", code=64)
    assert "is an export already" in twice["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    # interrupted in the middle
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", "export", str(criteo.path), "--to", str(tmp_path / "no")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("writing the program"):  # it is written; the table is under way
            os.kill(process.pid, signal.SIGINT)
    process.stderr.close()
    assert process.wait(60) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_changed_exports_are_refused(exported, tmp_path) -> None:
    copy = tmp_path / "copy"

    def refused(change) -> str:
        subprocess.run(["cp", "-r", exported, copy], check=True)
        change()
        found = in_this_process("predict", "--export", copy, "--to", tmp_path / "x.parquet", code=64)
        subprocess.run(["rm", "-r", copy], check=True)
        return found["error"]["message"]

    def edit(name: str, old: bytes, new: bytes) -> None:
        raw = (copy / name).read_bytes()
        assert old in raw
        (copy / name).write_bytes(raw.replace(old, new, 1))

    assert "format 2, this version reads 1" in refused(lambda: edit("export.json", b'"format": 1', b'"format": 2'))
    assert "missing files ['tables" in refused(lambda: next(copy.rglob("*.parquet")).unlink())
    assert "unexpected files" in refused(lambda: (copy / "tables" / "more").write_text("x"))
    params = copy / "dense" / "model.pdiparams"
    assert "pdiparams is damaged" in refused(lambda: params.write_bytes(params.read_bytes()[:-1] + b"\x7f"))
    assert not (tmp_path / "x.parquet").exists()


# ------------------------------------------------------------------------------------------------------- synthetic data


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Trained:
    """Lists, sequences of none, two labels, two tables; the tables admit every key."""
    folder = tmp_path_factory.mktemp("clicks")
    synthetic.generate(folder / "data", rows=8_000, seed=4)
    data = synthetic.data_section(folder / "data")
    for part in ("train", "eval"):
        for path in (folder / "data" / part).glob("*.parquet"):
            table = pq.read_table(path)
            buy = pa.array((table["click"].to_numpy() * (np.arange(len(table)) % 3 == 0)).astype(np.int8))
            pq.write_table(table.append_column("buy", buy), path)
    tags = next(f for f in data["sparse"] if f.get("max_length"))
    for feature in data["sparse"]:
        if feature["name"] in ("item", tags["name"]):
            feature |= {"table": "items", "key_space": feature["name"]}
    data |= {"labels": ["click", "buy"], "batch_rows": 500, "dense": {**data["dense"], "clip": None}}
    table = {"width": 4, "initial_range": 0.1, "first_order": False, "optimizer": {"rule": "adam"}}
    job = Job(
        folder,
        data,
        {
            "tables": {"default": table, "items": {**table, "width": 6}},
            "model": {"kind": "esmm", "tower": [8]},
            "train": {"negative_sampling": {"keep": 0.5}},
            "cluster": {"servers": 1, "trainers": 1},
        },
    )
    return Trained(folder, job.path)


def test_several_labels_have_a_column_each(clicks, tmp_path) -> None:
    expected, _ = clicks.evaluated()
    paddlewheel("export", clicks.path, "--to", tmp_path / "export")
    spec = json.loads((tmp_path / "export" / "export.json").read_text())
    assert spec["program"]["logit_shift"] == pytest.approx(np.log(0.5))
    for table in spec["tables"].values():  # a folder of Parquet alone, as any reader takes it
        assert pq.read_table(tmp_path / "export" / table["folder"]).num_rows == table["keys"]
    in_this_process("predict", "--export", tmp_path / "export", "--to", tmp_path / "e.parquet", "--data", clicks.eval)
    paddlewheel("predict", clicks.step.parent, "--to", tmp_path / "s.parquet", "--data", clicks.eval)
    for source in ("e", "s"):
        table = pq.read_table(tmp_path / f"{source}.parquet")
        assert table.column_names == ["score_click", "score_buy"]
        for at, name in enumerate(table.column_names):
            np.testing.assert_allclose(table[name].to_numpy(), expected[:, at], rtol=0, atol=1e-6)
    rows = [row for path in sorted(Path(clicks.eval).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    np.savez(tmp_path / "in.npz", **Reader(tmp_path / "export").arrays(rows[:300]))
    words = [
        sys.executable,
        "-I",
        "-c",
        FRESH,
        tmp_path / "export/dense/model",
        tmp_path / "in.npz",
        tmp_path / "o.npz",
    ]
    subprocess.run(words, cwd="/", check=True, capture_output=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "o.npz")["probability"], expected[:300], rtol=0, atol=1e-6)


def odd_rows(folder: Path, clicks: Trained) -> Path:
    """Two files with row groups of 70, no labels, one infinite number and one null that is filled."""
    source = pq.read_table(min(Path(clicks.eval).glob("*.parquet"))).slice(0, 400).drop_columns(["click", "buy"])
    price = source["price"].to_pylist()
    price[123], price[124] = float("inf"), None
    at = source.schema.get_field_index("price")
    source = source.set_column(at, "price", pa.array(price, source.schema.field(at).type))
    source = source.append_column("row", pa.array(range(400), pa.int32()))
    folder.mkdir()
    pq.write_table(source.slice(0, 250), folder / "a.parquet", row_group_size=70)
    pq.write_table(source.slice(250), folder / "b.parquet", row_group_size=70)
    return folder


def test_bad_rows_follow_the_jobs_policy(clicks, tmp_path) -> None:
    data = odd_rows(tmp_path / "odd", clicks)
    arguments = ["predict", clicks.path, "--data", data, "--to", tmp_path / "o.parquet", "--columns", "row", "item"]
    stopped = paddlewheel(*arguments, code=64)
    assert "a.parquet: row 123: column 'price' is inf" in stopped["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]
    told = paddlewheel(*arguments, "--set", "data.on_bad_row=skip")
    assert (told["rows"], told["unscored_rows"]) == (400, 1)
    table = pq.read_table(tmp_path / "o.parquet")
    assert table.column_names == ["row", "item", "score_click", "score_buy", "problem"]
    assert table["row"].to_pylist() == list(range(400))
    assert table["row"].type == pa.int32()
    missing = [row for row, score in enumerate(table["score_click"].to_pylist()) if score is None]
    assert missing == [row for row, why in enumerate(table["problem"].to_pylist()) if why] == [123]
    assert "not a finite number" in table["problem"][123].as_py()
    assert "exists already" in in_this_process(*arguments, code=64)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "x"], "give either a job file or a checkpoint, or --export"),
        (["JOB", "--export", "y", "--to", "x"], "give either"),
        (["--export", "/nowhere", "--to", "x"], "is no export"),
        (["JOB", "--lookup", "y", "--to", "x"], "--lookup goes with --export"),
        (["JOB", "--columns", "score_click", "--to", "x"], "--columns score_click"),
        (["JOB", "--columns", "clik", "--to", "x"], "nearest are 'click'"),
        (["JOB", "--data", "/nowhere.parquet", "--to", "x"], "/nowhere.parquet"),
        (["/nowhere", "--to", "x"], "no such job file"),
    ],
)
def test_mistakes_are_told_before_anything_starts(clicks, arguments, words, monkeypatch, capsys) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a server was started")

    monkeypatch.setattr("paddlewheel.pserver.local.local_servers", never)
    given = [str(clicks.path) if word == "JOB" else word for word in arguments]
    assert run(["predict", *given]) == 64
    assert words in capsys.readouterr().err


def test_a_job_begins_with_an_export(clicks, tmp_path) -> None:
    in_this_process("export", clicks.path, "--to", tmp_path / "export", "--dtype", "bfloat16", "--no-compare")
    settings = yaml.safe_load(clicks.path.read_text())
    settings |= {"warm_start": {"source": str(tmp_path / "export"), "dense": True}, "run_dir": str(tmp_path / "run")}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    still = ["--set=tables.default.optimizer.learning_rate=1e-12", "--set=tables.items.optimizer.learning_rate=1e-12"]
    result = paddlewheel("train", tmp_path / "job.yaml", *still, "--set=train.dense_optimizer.learning_rate=1e-12")[
        "result"
    ]
    for metric in ("auc", "logloss"):
        assert result["eval"][metric] == pytest.approx(clicks.result["eval"][metric], abs=2e-3)
    assert {name: t["keys"] for name, t in result["warm_start"]["tables"].items()} == clicks.result["keys"]
