"""Where a user's own model is found: beside the job file, whatever the working directory; and no other file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddlewheel.trainer.coordinator.resume import identity
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.models import ModelError, own_module, parse_model
from paddlewheel.trainer.models.config import CustomModelConfig

JOB = """
name: mine
data: {train: t, labels: [click], sparse: [{name: user}]}
model: {kind: 'my_models:Net', options: {units: 3}}
"""


@pytest.fixture(autouse=True)
def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own_module, "_loaded", {})
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and its module; the working directory is another one, with another module of that name."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(JOB)
    (tmp_path / "jobs" / "my_models.py").write_text("class Net:\n    here = 'beside'\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my_models.py").write_text("class Net:\n    here = 'working directory'\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # as `python -m` does
    return tmp_path / "jobs"


def model_of(place: Path, *overrides: str) -> CustomModelConfig:
    model = JobConfig.load(place / "job.yaml", overrides).model
    assert isinstance(model, CustomModelConfig)
    return model


@pytest.mark.parametrize("path", ["job.yaml", "../jobs/job.yaml"])
def test_a_module_is_found_beside_the_job_file_and_goes_with_the_job(place: Path, path: str) -> None:
    model = model_of(place, f"name={path[-3:]}")
    file = place / "my_models.py"
    assert own_module.find(model) == file
    assert (model.folder, model.sha256) == (str(place), hashlib.sha256(file.read_bytes()).hexdigest())
    assert own_module.load(model).here == "beside"
    assert own_module.load(parse_model(model.model_dump())).here == "beside"


def test_a_module_of_a_package_imports_what_is_beside_it(place: Path) -> None:
    (place / "zoo" / "deep").mkdir(parents=True)
    (place / "zoo" / "__init__.py").write_text("")
    (place / "zoo" / "deep" / "__init__.py").write_text("")
    (place / "zoo" / "deep" / "nets.py").write_text("from layers_of_mine import one\nclass Net:\n    here = one\n")
    (place / "layers_of_mine.py").write_text("one = 1\n")
    model = model_of(place, "model.kind='zoo.deep.nets:Net'")
    assert own_module.find(model) == place / "zoo" / "deep" / "nets.py"
    assert own_module.load(model).here == 1


def test_two_jobs_in_one_process_each_get_their_module(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.yaml").write_text(JOB)
    (other / "my_models.py").write_text("class Net:\n    here = 'other'\n")
    assert [own_module.load(model_of(folder)).here for folder in (place, other, place)] == ["beside", "other", "beside"]


def test_installed_modules_are_found_and_the_working_directory_is_not_searched(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "my_models.py").unlink()
    with pytest.raises(ModelError, match=r"no module 'my_models' in .*/jobs .*Put my_models\.py beside the job file"):
        own_module.find(model_of(place))
    site = tmp_path / "site"
    site.mkdir()
    (site / "my_models.py").write_text("class Net:\n    here = 'installed'\n")
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(site)])
    assert own_module.load(model_of(place)).here == "installed"


def test_the_working_directory_counts_where_pythonpath_names_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "my_models.py").unlink()
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    assert own_module.load(model_of(place)).here == "working directory"


def test_a_file_that_has_changed_is_refused_until_it_is_taken_as_it_is(place: Path, tmp_path: Path) -> None:
    before = model_of(place)
    old = tmp_path / "old"
    old.mkdir()
    (old / "my_models.py").write_bytes((place / "my_models.py").read_bytes())
    (place / "my_models.py").write_text("class Net:\n    here = 'changed'\n")
    with pytest.raises(ModelError, match="is not what the job was given or trained with"):
        own_module.load(before)
    assert own_module.load(before.model_copy(update={"sha256": "any"})).here == "changed"
    assert own_module.load(before.model_copy(update={"folder": str(old)})).here == "beside"
    now = model_of(place).model_dump()
    with pytest.raises(ModelError, match=r"the file of my_models:Net has changed.*--set model\.sha256=any"):
        own_module.check_same_file(before.model_dump(), now)
    own_module.check_same_file(before.model_dump(), model_of(place, "model.sha256=any").model_dump())
    own_module.check_same_file({"kind": "my_models:Net"}, now)  # of an earlier version


def test_a_job_is_the_same_in_another_folder_but_not_with_another_file(place: Path, tmp_path: Path) -> None:
    def known() -> object:
        return identity(JobConfig.load(place / "job.yaml").model_dump(mode="json"))

    before, moved = known(), tmp_path / "moved"
    place.rename(moved)
    place = moved
    assert known() == before
    (place / "my_models.py").write_text("class Net:\n    here = 'changed'\n")
    assert known() != before


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("my_models:Nut", "class Net: pass", r"my_models\.py has no Nut\. It has: Net"),
        ("my_models:Net", "import no_such_thing", "cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        ("my_models:Net", "class Net", "cannot be imported: SyntaxError"),
        ("yaml:Net", "class Net: pass", r"yaml\.py cannot be imported: .* the name yaml is taken by"),
        ("my_models.inner:Net", "", "there is no module 'my_models.inner'"),
        ("my_models..inner:Net", "", "there is no module"),
        ("sys:Net", "", "there is no module 'sys'"),
    ],
)
def test_what_cannot_be_had_is_told(place: Path, kind: str, code: str, words: str) -> None:
    module = kind.partition(":")[0]
    if code:
        (place / f"{module}.py").write_text(code)
    with pytest.raises(ModelError, match=words):
        own_module.load(model_of(place, f"model.kind='{kind}'"))
