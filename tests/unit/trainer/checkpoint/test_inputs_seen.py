"""Whoever uses a trained model refuses data of other kinds, and another fit, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from paddlewheel.data_pipeline import DataError
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.fit import fit
from paddlewheel.deploy.checks import preflight
from paddlewheel.deploy.cli.arguments import OtherModelError, find_model
from paddlewheel.deploy.cli.train import _run as run_command
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.trained_model import open_model
from paddlewheel.trainer.coordinator import resume
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.resume import ResumeError
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.serving.export import export_model
from paddlewheel.trainer.serving.predict import Request
from paddlewheel.trainer.worker import warm_start
from tests.support.parquet_files import write

ROWS = 40


class Case:
    """A job and its checkpoint, made by hand: integers as ids, a standardised number, a vocabulary, quantiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("train", range(ROWS))
        self.write("integers", range(ROWS))
        self.write("text", [str(i) for i in range(ROWS)])
        self.fit("train")
        self.checkpoint = self.save(self.job(), known=True)

    def write(self, name: str, ids: Any) -> None:
        columns = {"click": [i % 2 for i in range(ROWS)], "user": list(ids), "d": np.arange(ROWS) / 7}
        write(self.folder / name / "a.parquet", columns)

    def fit(self, name: str) -> None:
        data = self.job(train=name).data
        fit(Dataset.open(data.train, data, require_fitted=False), data)

    def job(
        self, *, train: str = "train", evaluated: str = "integers", user: dict | None = None, **more: Any
    ) -> JobConfig:
        data = {
            "train": str(self.folder / train),
            "eval": str(self.folder / evaluated),
            "labels": ["click"],
            "dense": {"columns": ["d"], "standardise": True},
            "sparse": [
                {"name": "user", "vocabulary": {"min_count": 1}, **(user or {})},
                {"name": "q", "column": "d", "bucketize": {"kind": "quantiles", "num_buckets": 4}, "table": "buckets"},
            ],
            "statistics": str(self.folder / "fitted"),
            "threads": 0,
        }
        raw = {
            "name": "j",
            "run_dir": str(self.folder / "run"),
            "data": data,
            "tables": {"default": {"width": 4}, "buckets": {"width": 4}},
            "model": {"kind": "deepfm", "tower": [4]},
            **more,
        }
        return JobConfig.parse(raw)

    def save(self, job: JobConfig, *, known: bool) -> Path:
        draft = manifest.Draft(self.folder / "run/checkpoints", ".step-9-x", 9)
        (draft.sparse / "part").write_text("content")
        facts: dict[str, Any] = {"settings": job.model_dump(mode="json")}
        if known:
            facts["inputs_seen"] = Dataset.open(job.data.train, job.data).signature.model_dump(mode="json")
        cursor = {
            "version": 1,
            "step": 9,
            "rows": ROWS,
            "position": {"epoch": 1, "done": []},
            "attempt": 1,
            "draft": ".step-9-x",
            "job": resume.identity(job),
        }
        draft.finish(dense={"w": np.ones(2, np.float32)}, cursor=cursor, facts=facts)
        return manifest.commit(draft.path, 9, 3)

    def refit(self) -> None:
        self.write("other", range(0, 3 * ROWS, 3))
        table = pa.table({"click": [0, 1] * 20, "user": list(range(5, 45)), "d": np.arange(ROWS) * 2.0})
        write(self.folder / "other/a.parquet", table)
        self.fit("other")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def kinds_refused(case: Case, data: str) -> Any:
    words = (
        rf"column 'user' of feature 'user' is string \(key kind string\) in {case.folder}/{data}/a\.parquet, and was "
        rf"int64 \(key kind integer\) in {case.folder}/train/a\.parquet, with which .* was trained: .*type: integer"
    )
    return pytest.raises(DataError, match=words)


def fit_refused() -> Any:
    return pytest.raises(
        DataError, match=r"data\.statistics: dense d, vocabulary user, quantiles q .*40 rows .*was trained"
    )


def test_evaluate_train_on_and_job_check_refuse_other_kinds(case):
    address = str(case.checkpoint)
    preflight.check(case.job(), "evaluate", restore=address)
    preflight.check(case.job())
    with kinds_refused(case, "text"):
        preflight.check(case.job(evaluated="text"), "evaluate", restore=address)
    new_days = case.job(train="text", evaluated="text")
    with kinds_refused(case, "text"):
        preflight.check(new_days)
    with kinds_refused(case, "text"):  # no new value of the job, but other data
        preflight.check(new_days, resume="always")
    preflight.check(new_days, resume="never")
    remedied = case.job(evaluated="text", user={"type": "integer"})
    fit(Dataset.open(remedied.data.train, remedied.data, require_fitted=False), remedied.data)
    preflight.check(remedied, "evaluate", restore=address)


def test_the_command_hands_on_what_the_run_begins_with(case):
    with kinds_refused(case, "text"):
        run_command(case.job(evaluated="text"), "evaluate", str(case.checkpoint), "auto", json=True)
    case.refit()
    with fit_refused():
        run_command(case.job(), "train", None, "auto", json=True)


def test_another_fit_is_refused_unless_the_user_wants_it(case):
    case.refit()
    with fit_refused():
        preflight.check(case.job(), "evaluate", restore=str(case.checkpoint))
    with fit_refused():
        preflight.check(case.job())
    preflight.check(case.job(), resume="always")
    preflight.check(case.job(), resume="never")
    case.fit("train")  # the same fit again
    preflight.check(case.job())


def test_predict_refuses_other_kinds_and_another_fit(case):
    trained, target = open_model(case.checkpoint), case.folder / "scores.parquet"
    job, text = case.job(), [str(case.folder / "text")]
    Request.check(job, [], [], target, trained=trained)
    with kinds_refused(case, "text"):
        Request.check(job, text, [], target, trained=trained)
    remedied = case.job(user={"type": "integer"})
    case.fit("train")
    with pytest.raises(DataError, match="was made for other settings of 'vocabulary user'"):
        Request.check(remedied, text, [], target, trained=trained)
    fit(Dataset.open(remedied.data.train, remedied.data, require_fitted=False), remedied.data)
    Request.check(remedied, text, [], target, trained=trained)
    case.refit()
    with fit_refused():
        Request.check(job, [], [], target, trained=trained)


def test_export_refuses_another_fit_and_an_evaluation_of_other_kinds(case):
    trained, target = open_model(case.checkpoint), case.folder / "export"
    with kinds_refused(case, "text"):
        export_model(case.job(evaluated="text"), trained, target, dtype="int8")
    case.refit()
    with fit_refused():
        export_model(case.job(), trained, target)
    assert not target.exists()


def test_a_warm_start_refuses_other_kinds_and_what_is_scaled_otherwise(case):
    def planned(dense: bool = False, tables: dict | None = None, **more: Any) -> warm_start.WarmStart:
        start = {"source": str(case.checkpoint), "dense": dense, **({"tables": tables} if tables else {})}
        job = case.job(warm_start=start, **more)
        return warm_start.plan(job, Dataset.open(job.data.train, job.data).signature)

    planned(dense=True)
    with kinds_refused(case, "text"):
        planned(train="text")
    planned(train="text", tables={"buckets": "buckets"})  # these keys are not taken
    case.refit()
    planned(tables={"default": "default"})  # other keys are known, but they mean the same
    with pytest.raises(DataError, match=r"data\.statistics: quantiles q "):
        planned(tables={"buckets": "buckets"})
    with pytest.raises(DataError, match=r"data\.statistics: dense d "):
        planned(dense=True, tables={"default": "default"})


def test_a_renamed_feature_of_the_same_key_space_is_compared_too(case):
    start = {"source": str(case.checkpoint), "tables": {"default": "default"}}
    renamed = {"name": "member", "column": "user", "key_space": "user"}
    job = case.job(train="text", user=renamed, warm_start=start)
    fit(Dataset.open(job.data.train, job.data, require_fitted=False), job.data)
    with pytest.raises(DataError, match=r"of feature 'member' is .* was int64"):
        warm_start.plan(job, Dataset.open(job.data.train, job.data).signature)


def test_declaring_what_the_keys_are_anyway_is_no_change_of_the_job(case, tmp_path):
    def plan(user: dict) -> JobPlan:
        job = case.job(user=user)
        return JobPlan(job=job)

    assert resume.find_start(plan({"type": "integer"})).path == str(case.checkpoint)
    with pytest.raises(ResumeError, match=r"data\.sparse"):
        resume.find_start(plan({"offset": 3}))
    path = tmp_path / "job.yaml"
    path.write_text(case.job(user={"type": "integer"}).model_dump_json())
    with find_model(str(path), None, ()) as (job, trained):
        assert job.data.sparse[0].type == "integer"
        assert trained.inputs is not None
    path.write_text(case.job(user={"null_policy": "own_key"}).model_dump_json())
    with pytest.raises(OtherModelError, match=r"data\.sparse"), find_model(str(path), None, ()):
        pass


def test_a_checkpoint_that_does_not_say_is_used_as_before(case):
    case.save(case.job(), known=False)
    assert open_model(case.checkpoint).inputs is None
    preflight.check(case.job(evaluated="text"), "evaluate", restore=str(case.checkpoint))


def test_a_checkpoint_whose_signature_cannot_be_read_is_refused(case):
    draft = manifest.Draft(case.folder / "run/checkpoints", ".step-10-x", 10)
    draft.finish(
        dense={"w": np.ones(2, np.float32)},
        cursor={},
        facts={"inputs_seen": {"kinds": 3}, "settings": case.job().model_dump(mode="json")},
    )
    with pytest.raises(manifest.CheckpointError, match="step-10: the signature of its inputs cannot be read"):
        open_model(manifest.commit(draft.path, 10, 3))
