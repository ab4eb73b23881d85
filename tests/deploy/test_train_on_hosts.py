"""`paddlewheel train --hosts` over several test hosts: slow network, unplugged host, taken metrics port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from paddlewheel.data_pipeline.synthetic import generate
from tests.support.networks import Network, network

pytestmark = [
    pytest.mark.needs("network namespaces"),
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
ROOT = Path(__file__).parents[2]
HEAD, NODES = "10.77.2.1", {"node1": "10.77.2.11", "node2": "10.77.2.12"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=20_000, seed=1)
    return folder


@dataclass
class Cluster:
    """The launching host and two others."""

    net: Network
    folder: Path
    data: Path
    run: subprocess.Popen | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def launch(self, *, epochs: int, control: dict | None = None, arguments: tuple[str, ...] = ()) -> subprocess.Popen:
        """Starts `paddlewheel train` on the launching host; `ip netns exec` stands for ssh."""
        raw = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
        raw |= {"name": "spread", "run_dir": str(self.run_dir), "train": {"epochs": epochs}}
        raw["data"] |= {"train": str(self.data / "train"), "eval": str(self.data / "eval"), "batch_rows": 256}
        raw["checkpoint"] = {"every_minutes": 0.1}
        raw["control"] = {"heartbeat_timeout_seconds": 8, "max_restarts": 3, **(control or {})}
        (self.folder / "job.yaml").write_text(yaml.safe_dump(raw))
        # The command that stands for ssh must find the namespace of a host by its name.
        connect = self.folder / "connect"
        cases = "\n".join(f"{name}) ns={host.namespace};;" for name, host in self.net.hosts.items())
        connect.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nexec ip netns exec "$ns" sh -c "exec $2"\n')
        connect.chmod(0o755)
        hosts = {
            "coordinator": HEAD,
            "connect": [str(connect), "{name}"],
            "command": f"{sys.executable} -m paddlewheel.deploy.cli",
            "hosts": [
                {"name": name, "address": name, "servers": 1, "trainers": 1, "first_port": 7100, "threads": 1}
                for name in NODES
            ],
        }
        (self.folder / "hosts.yaml").write_text(yaml.safe_dump(hosts))
        command = [sys.executable, "-m", "paddlewheel.deploy.cli", "train", str(self.folder / "job.yaml"), "--json"]
        self.run = self.net.hosts["head"].run(
            [*command, "--hosts", str(self.folder / "hosts.yaml"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        return self.run

    def answer(self, run: subprocess.Popen, seconds: float) -> dict:
        """The command's JSON; fails with all logs."""
        try:
            out, err = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            pytest.fail(f"still running after {seconds:g} s\n{self.logs()}")
        assert out, err.decode()
        said = json.loads(out)
        assert run.returncode == said["exit_code"]
        return said

    def logs(self) -> str:
        files = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"== {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-20:]) for f in files)

    def step(self) -> int:
        """Of trainer 0, by the status page; -1 before there is one."""
        script = (
            "import json, sys, urllib.request as r, pathlib as p\n"
            "g = json.loads(p.Path(sys.argv[1]).read_text())[0]\n"
            "s = json.load(r.urlopen(f\"{g['labels']['__scheme__']}://{g['targets'][0]}/status.json\", timeout=3))\n"
            "print((s['progress'] or {}).get('step', -1))"
        )
        target = self.run_dir / "targets" / "spread-coordinator-0.json"
        asked = [*self.net.hosts["head"].prefix, sys.executable, "-c", script, str(target)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return int(done.stdout) if done.returncode == 0 else -1


@pytest.fixture
def cluster(tmp_path: Path, data: Path) -> Iterator[Cluster]:
    with network({"head": HEAD, **NODES}) as net:
        made = Cluster(net, tmp_path, data)
        yield made
        if made.run is not None and made.run.poll() is None:  # the test has failed
            made.run.terminate()
            made.run.communicate(timeout=30)


def test_a_job_over_a_slow_network(cluster: Cluster, eventually: Callable[..., None]) -> None:
    """Names instead of addresses, a metrics port that somebody has, 4 to 6 ms a packet."""
    cluster.net.impair(delay_ms=2, jitter_ms=1)
    script = (
        "import socket, time\ns = socket.create_server(('node2', 7102))\nprint('mine', flush=True)\ntime.sleep(600)"
    )
    thief = cluster.net.hosts["node2"].run([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert thief.stdout is not None
        assert thief.stdout.readline() == b"mine\n"
        run = cluster.launch(epochs=3)
        eventually(lambda: cluster.step() > 0, seconds=120, what=f"training\n{cluster.logs()}")
        targets = {path.stem for path in (cluster.run_dir / "targets").iterdir()}
        said = cluster.answer(run, 200)
    finally:
        thief.kill()
        thief.communicate()
    assert said["exit_code"] == 0, cluster.logs()
    assert said["result"]["rows"] == 3 * 16_000
    assert targets == {"spread-coordinator-0", "spread-pserver-0", "spread-trainer-0", "spread-trainer-1"}
    assert "going on without" in (cluster.run_dir / "logs" / "pserver-1.log").read_text()


def test_an_unplugged_host_is_noticed_and_the_job_goes_on_when_it_is_back(
    cluster: Cluster, eventually: Callable[..., None]
) -> None:
    run = cluster.launch(epochs=15)
    eventually(lambda: cluster.step() > 30, seconds=120, what="training")
    cut_at = time.monotonic()
    cluster.net.impair(cut=("node2",))
    journal = cluster.run_dir / "journal.jsonl"

    def noticed() -> bool:
        return any(json.loads(line).get("what") == "lost" for line in journal.read_text().splitlines())

    eventually(noticed, seconds=40, what=f"the loss\n{journal.read_text()}\n{cluster.logs()}")
    assert time.monotonic() - cut_at < 30
    cluster.net.impair()
    said = cluster.answer(run, 250)
    assert said["exit_code"] == 0, f"{said['cause']}\n{cluster.logs()}"
    assert said["num_restarts"] >= 1
    assert said["result"]["rows"] == 15 * 16_000


def test_printed_commands(cluster: Cluster) -> None:
    run = cluster.launch(epochs=1, arguments=("--print-commands", "--set", "cluster.coordinator_port=7070"))
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err.decode()
    assert out.decode().count("# on node") == 4
    assert not cluster.run_dir.exists()
    assert os.environ.get("PADDLEWHEEL_TOKEN") is None
