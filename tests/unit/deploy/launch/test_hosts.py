"""The host file: who runs where, with which ports, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddlewheel.deploy.launch.hosts import HostsConfig, HostsError, print_commands
from paddlewheel.trainer.job.config import JobConfig


def job(**changes: Any) -> JobConfig:
    raw = {
        "name": "j",
        "data": {"train": "/d", "labels": ["click"], "sparse": [{"name": "a"}]},
        "cluster": {"servers": 3, "trainers": 2, "coordinator_port": 7070},
    }
    return JobConfig.parse({**raw, **changes})


def load(folder: Path, raw: Any, config: JobConfig | None = None) -> HostsConfig:
    path = folder / "hosts.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return HostsConfig.load(path, config or job())


HOSTS = [
    {"name": "n1", "address": "10.0.0.1", "servers": 2, "trainers": 1, "first_port": 7100, "threads": 8},
    {"name": "n2", "address": "10.0.0.2", "servers": 1, "trainers": 1},
]


def test_ranks_and_ports(tmp_path: Path) -> None:
    hosts = load(tmp_path, {"coordinator": "10.0.0.9", "hosts": HOSTS})
    places = [*hosts.places("pserver"), *hosts.places("trainer")]
    assert [(p.role, p.rank, p.host.name, p.first_port) for p in places] == [
        ("pserver", 0, "n1", 7100),
        ("pserver", 1, "n1", 7103),
        ("pserver", 2, "n2", None),
        ("trainer", 0, "n1", 7106),
        ("trainer", 1, "n2", None),
    ]


def test_commands(tmp_path: Path) -> None:
    hosts = load(
        tmp_path,
        {
            "coordinator": "10.0.0.9",
            "hosts": HOSTS,
            "command": "/opt/my venv/bin/paddlewheel".replace(" ", "\\ "),
            "environment": {"PADDLEWHEEL_TOKEN_FILE": "/etc/the token"},
        },
    )
    place = next(iter(hosts.places("trainer")))
    line = place.shell_command(job(), "10.0.0.9:7070", Path("/runs/targets"))
    words = shlex.split(line)
    assert words[:2] == ["env", "PADDLEWHEEL_TOKEN_FILE=/etc/the token"]
    assert "OMP_NUM_THREADS=8" in words
    start = words.index("/opt/my venv/bin/paddlewheel")
    told = dict(zip(words[start + 3 :: 2], words[start + 4 :: 2], strict=True))
    assert words[start + 1 : start + 3] == ["role", "trainer"]
    assert told == {
        "--coordinator": "10.0.0.9:7070",
        "--rank": "0",
        "--host": "10.0.0.1",
        "--job-name": "j",
        "--port": "7106",
        "--health": "10.0.0.1:7107",
        "--metrics": "10.0.0.1:7108",
        "--targets": "/runs/targets",
    }
    connected = place.connected(line)
    assert connected[0] == "ssh"
    assert connected[-3:] == ["n1", "--", line]


def test_printed_commands_name_every_machine(tmp_path: Path) -> None:
    hosts = load(tmp_path, {"coordinator": "10.0.0.9", "hosts": HOSTS})
    text = print_commands(job(), Path("job.yaml"), hosts, ("train.epochs=2",))
    lines = text.splitlines()
    assert lines[:2] == [
        "# here",
        "paddlewheel role coordinator job.yaml --listen 10.0.0.9:7070 --set train.epochs=2",
    ]
    assert [line for line in lines if line.startswith("#")] == [
        "# here",
        *["# on n1"] * 2,
        "# on n2",
        "# on n1",
        "# on n2",
    ]
    with pytest.raises(HostsError, match=r"cluster\.coordinator_port=7070"):
        print_commands(job(cluster={"servers": 3, "trainers": 2}), Path("job.yaml"), hosts, ())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"coordinator": "x", "hosts": HOSTS[:1]}, "2 servers, but cluster.servers of the job is 3"),
        ({"coordinator": "x", "hosts": HOSTS, "comand": "y"}, "did you mean command"),
        ({"coordinator": "x", "hosts": [{**HOSTS[0], "adress": "y"}]}, "did you mean address"),
        ({"coordinator": "x", "hosts": [{"name": "n"}]}, "hosts.0.address: Field required"),
        ({"coordinator": "x", "hosts": []}, "hosts"),
        ("a: [", "cannot be read"),
        ("- a", "dictionary"),
        (
            {"coordinator": "x", "hosts": [HOSTS[0], {**HOSTS[1], "address": "10.0.0.1", "first_port": 7105}]},
            "port 7105 of 10.0.0.1 would be used twice: move first_port of n2",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(HostsError, match=message):
        load(tmp_path, raw)
    with pytest.raises(HostsError, match="cannot be read"):
        HostsConfig.load(tmp_path / "nowhere.yaml", job())
