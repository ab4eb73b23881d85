"""What a job may begin with is decided from descriptions, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import resume
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.worker import warm_start

SPARSE = [
    {"name": "user"},
    {"name": "item", "table": "items"},
    {"name": "history", "table": "items", "max_length": 5, "pooling": "mean"},
]
TABLES = {"default": {"width": 8}, "items": {"width": 4, "first_order": False}}


def job_of(
    start: dict | None = None, *, sparse: list | None = None, tables: dict | None = None, **sections
) -> JobConfig:
    data = {"train": "/t", "labels": ["click"], "sparse": sparse or SPARSE, "dense": {"columns": ["x", "y"]}}
    whole = {"name": "mine", "data": data, "tables": tables or TABLES, "model": {"kind": "dcn"}, **sections}
    return JobConfig.parse({**whole, "warm_start": start} if start else whole)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    draft = manifest.Draft(tmp_path / "checkpoints", ".step-7-x", 7)
    (draft.sparse / "part").write_text("content")
    job = job_of()
    dense = {"tower.w": np.ones(2, np.float32), "adam/moment1/tower.w": np.ones(2, np.float32)}
    cursor = {"job": resume.identity(job)}
    draft.finish(dense=dense, cursor=cursor, facts={"settings": job.model_dump(mode="json")})
    return manifest.commit(draft.path, 7, 3)


def problems_of(job: JobConfig) -> str:
    with pytest.raises(ConfigError) as found:
        warm_start.plan(job)
    return str(found.value)


def test_tables_of_equal_name_are_taken_by_default(source: Path) -> None:
    for path in (source, source.parent, source.parent.parent):  # a checkpoint, its folder, the run folder
        start = warm_start.plan(job_of({"source": str(path)}))
        assert (start.source.path, start.source.step) == (source, 7)
        assert start.tables == {"default": "default", "items": "items"}
        assert not start.dense
    assert set(start.source.parameters()) == {"tower.w"}  # not the optimizer's state


def test_only_the_tables_named_are_taken(source: Path) -> None:
    start = warm_start.plan(job_of({"source": str(source), "tables": {"items": "items"}, "dense": True}))
    assert (start.tables, start.dense) == ({"items": "items"}, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tables": {**TABLES, "items": {"width": 6, "first_order": False}}},
            ["tables.items.width: is 6", "'items' of", "has 4; only 4 is allowed", "leave 'items' out"],
        ),
        ({"tables": {**TABLES, "items": {"width": 4}}}, ["tables.items.first_order: is true", "has false"]),
    ],
)
def test_another_shape_names_key_value_allowed_and_remedy(source: Path, change: dict, words: list[str]) -> None:
    said = problems_of(job_of({"source": str(source)}, **change))
    for word in (*words, str(source)):
        assert word in said


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"item": "items"}, ["warm_start.tables.item", "did you mean items?"]),
        ({"items": "itemz"}, ["has no table 'itemz'; did you mean items?", "There are: default, items"]),
        ({}, ["nothing is taken from"]),
        # the width fits, but no key could be met: the features of `default` make keys in the space `user`
        ({"items": "default"}, ["tables.items.width"]),
    ],
)
def test_a_mapping_that_takes_nothing_is_refused(source: Path, tables: dict, words: list[str]) -> None:
    said = problems_of(job_of({"source": str(source), "tables": tables}))
    for word in words:
        assert word in said


def test_a_renamed_table_whose_keys_would_never_meet_is_refused(source: Path) -> None:
    renamed = [{"name": "goods", "column": "item", "table": "goods"}]
    tables = {"goods": {"width": 4, "first_order": False}}
    start = {"source": str(source), "tables": {"goods": "items"}}
    said = problems_of(job_of(start, sparse=renamed, tables=tables))
    assert "no key of table 'items'" in said
    assert "`key_space: items`" in said
    renamed[0]["key_space"] = "items"
    assert warm_start.plan(job_of(start, sparse=renamed, tables=tables)).tables == {"goods": "items"}


def test_the_dense_part_needs_the_same_model_and_features(source: Path) -> None:
    start = {"source": str(source), "dense": True}
    said = problems_of(job_of(start, model={"kind": "dcn", "tower": [7]}))
    assert "warm_start.dense" in said
    assert "model.tower is [7] here" in said
    said = problems_of(job_of(start, sparse=[*SPARSE, {"name": "new"}]))
    assert "data.sparse" in said
    assert "warm_start.dense: false" in said
    assert warm_start.plan(job_of({**start, "dense": False}, sparse=[*SPARSE, {"name": "new"}])).tables


def test_no_model_at_the_source(tmp_path: Path) -> None:
    with pytest.raises(manifest.CheckpointError, match=r"warm_start.source: .*nothing is no trained model"):
        warm_start.plan(job_of({"source": str(tmp_path / "nothing")}))


def test_a_source_in_an_object_store_names_the_remedy() -> None:
    with pytest.raises(manifest.CheckpointError, match="checkpoint fetch"):
        warm_start.plan(job_of({"source": "s3://bucket/old"}))


def test_it_is_part_of_what_a_job_is(source: Path) -> None:
    before, after = (job_of(start) for start in (None, {"source": str(source)}))
    assert any("warm_start" in line for line in resume.differences(resume.identity(before), resume.identity(after)))


def test_a_relative_source_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: x\ndata: {labels: [y], sparse: [{name: a}]}\nwarm_start: {source: old}\n")
    assert JobConfig.load("job.yaml").warm_start.source == str(tmp_path / "old")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    for name in ("default", "items"):
        (folder / "tables" / name).mkdir(parents=True)
        (folder / "tables" / name / "export-00000.parquet").write_text(f"rows of {name}")
    (folder / "dense.safetensors").write_text("weights")
    settings = job_of().model_dump(mode="json")
    spec = {"settings": settings, "step": 7, "files": manifest.to_disk(folder)}
    (folder / "export.json").write_text(json.dumps(spec))
    return folder


def test_what_is_taken_of_an_export_is_verified(exported: Path) -> None:
    source = warm_start.plan(job_of({"source": str(exported), "dense": True})).source
    source.verify(["default", "items"], dense=True)
    table, dense = exported / "tables" / "items" / "export-00000.parquet", exported / "dense.safetensors"
    table.write_text("rows of itemz")
    dense.write_text("weightz")
    source.verify(["default"])
    with pytest.raises(manifest.CheckpointError, match=r"items.* is damaged"):
        source.verify(["default", "items"])
    with pytest.raises(manifest.CheckpointError, match=r"dense\.safetensors is damaged"):
        source.verify(dense=True)
    table.with_name("export-00001.parquet").write_text("more rows")
    with pytest.raises(manifest.CheckpointError, match="unexpected files"):
        source.verify(["default"])


def test_tables_of_a_damaged_source_are_not_written(exported: Path, tmp_path: Path) -> None:
    (exported / "tables" / "items" / "export-00000.parquet").write_text("rows of itemz")
    job = job_of({"source": str(exported)})
    with pytest.raises(manifest.CheckpointError, match="is damaged"):
        warm_start.write_tables(warm_start.plan(job), tmp_path / "new", job, 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [{"files": {"../x": {}}}, {"files": 7}, {"settings": []}, {"settings": {}}])
def test_an_export_that_is_not_ours_is_refused(exported: Path, change: dict) -> None:
    spec = json.loads((exported / "export.json").read_text())
    (exported / "export.json").write_text(json.dumps({**spec, **change}))
    with pytest.raises(manifest.CheckpointError, match="cannot be read"):
        warm_start.plan(job_of({"source": str(exported)}))


def test_a_table_that_would_leave_the_export_is_refused(exported: Path) -> None:
    spec = json.loads((exported / "export.json").read_text())
    spec["settings"]["data"]["sparse"][0]["table"] = "../../x"
    spec["settings"]["tables"]["../../x"] = spec["settings"]["tables"]["default"]
    (exported / "export.json").write_text(json.dumps(spec))
    with pytest.raises(manifest.CheckpointError, match="cannot be a table's name"):
        warm_start.plan(job_of({"source": str(exported)}))
