"""What the pages of deploy/ say is held against the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from paddlewheel.deploy.cli import build_app
from paddlewheel.deploy.kubernetes import KubernetesOptions, render
from paddlewheel.deploy.launch.hosts import HostsConfig
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.sizing import bytes_per_key
from paddlewheel.trainer.job.config import JobConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = ["README.md", "SIZING.md", "RUNBOOK.md", "SECURITY.md", "monitoring/README.md"]


def job() -> JobConfig:
    return JobConfig.parse(
        {
            "name": "NAME",
            "data": {"train": "s3://b/x", "labels": ["click"], "sparse": [{"name": "a"}]},
            "cluster": {"servers": 2, "trainers": 2},
        }
    )


def test_the_host_file_of_the_page_fits_a_job(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (tmp_path / "hosts.yaml").write_text(text)
    hosts = HostsConfig.load(tmp_path / "hosts.yaml", job())
    assert {place.host.name for place in hosts.places("trainer")} == {"train@node1", "train@node2"}
    assert yaml.safe_load(text)["coordinator"] == hosts.coordinator


def test_every_rendered_object_is_described() -> None:
    table = (
        (DEPLOY / "README.md")
        .read_text()
        .partition("| object | what it is for |\n| --- | --- |\n")[2]
        .partition("\n\n")[0]
    )
    described = set()
    for line in table.splitlines():
        kind = ""
        for item in (
            line.split("|")[1].strip().split(", ")
        ):  # "Job NAME-pserver, NAME-trainer" or "Kind name, Kind name"
            *new_kind, name = item.split(" ")
            kind = new_kind[0] if new_kind else kind
            described.add((kind, name))
    options = {"image": "x", "gang": "volcano", "operator": True}
    objects = render(job(), KubernetesOptions(**options))
    # The job's name is no DNS label, so its objects have a hash; the page says NAME.
    name = next(o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount")
    assert {(o["kind"], o["metadata"]["name"].replace(name, "NAME")) for o in objects} == described


def test_the_sizing_table_is_what_the_formula_says() -> None:
    rows = re.findall(r"^\| (\w+), (\d+) \| (\d+) \| (\d+) \|", (DEPLOY / "SIZING.md").read_text(), re.MULTILINE)
    assert len(rows) == 23
    for rule, width, measured, planned in rows:
        table = TableConfig.model_validate({"width": int(width), "optimizer": {"rule": rule}})
        assert round(bytes_per_key(table)) == int(planned), (rule, width)
        assert 1.0 <= int(planned) / int(measured) <= 1.26, (rule, width)


def test_variables_that_the_pages_name_are_read_somewhere() -> None:
    code = "".join(path.read_text() for package in ("trainer", "deploy") for path in (ROOT / package).rglob("*.py"))
    for page in ("README.md", "SECURITY.md"):
        for name in set(re.findall(r"PADDLEWHEEL_[A-Z_]+[A-Z]", (DEPLOY / page).read_text())):
            tail = name.removeprefix("PADDLEWHEEL_HTTP_")
            assert name in code or (tail != name and f"{{prefix}}{tail}" in code), name


def test_commands_and_options_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join((DEPLOY / page).read_text() for page in PAGES)
    for command in ("train", "predict", "deploy k8s", "role coordinator", "role pserver", "role trainer"):
        assert f"paddlewheel {command.split()[0]}" in text
        build_app()([*shlex.split(command), "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    others = {
        "--target",
        "--logdir",
        "--require-hashes",
        "--prometheus",
        "--job",
        "--minutes",
        "--rate-interval",
        "--only",
        "--check",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known | others


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = DEPLOY / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
