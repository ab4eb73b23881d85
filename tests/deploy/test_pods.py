"""Jobs as Kubernetes would run them: the rendered pods, with real servers and trainers, on hosts with a bad network."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from paddlewheel.data_pipeline.synthetic import generate
from paddlewheel.deploy.kubernetes import KubernetesOptions, render
from paddlewheel.trainer.job.config import JobConfig
from tests.support.networks import Network, network
from tests.support.pods import Kubelet, mount_points, shared_folder

pytestmark = [
    pytest.mark.needs("network namespaces", "tini", "setpriv"),
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(500),
]
ROOT = Path(__file__).parents[2]
NAME = "clicks-test"
ADDRESSES = {
    "coordinator-0": "10.77.1.1",
    "pserver-0": "10.77.1.10",
    "pserver-1": "10.77.1.11",
    "trainer-0": "10.77.1.20",
    "trainer-1": "10.77.1.21",
}


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    folder = shared_folder("paddlewheel-data-")
    generate(folder, rows=20_000, seed=1)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cluster(data: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Kubelet, Network]]]:
    runs = shared_folder("paddlewheel-runs-")
    made = mount_points()
    started: list[Kubelet] = []
    with network(ADDRESSES, names={f"{NAME}-coordinator": ADDRESSES["coordinator-0"]}) as net:

        def make(**changes: object) -> tuple[Kubelet, Network]:
            raw = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
            raw |= {"name": NAME, "checkpoint": {"every_minutes": 0.1}}
            raw["data"] |= {"train": "/data/train", "eval": "/data/eval", "batch_rows": 256}
            raw["control"] = {"heartbeat_timeout_seconds": 8, "max_restarts": 3}
            for key, value in changes.items():
                raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
            # The machine has few processors: one each, as the limits say.
            options = KubernetesOptions(image="none", data_claim="clicks", trainer_cpus=1, server_cpus=1)
            objects = render(JobConfig.parse({**raw, "run_dir": "runs"}), options)
            kubelet = Kubelet(objects, net.hosts, {"runs": runs, "data": data}, tmp_path)
            started.append(kubelet)
            return kubelet, net

        try:
            yield make
        finally:
            for kubelet in started:
                kubelet.close()
            for place in made:
                place.rmdir()
            shutil.rmtree(runs)


def result(runs: Path) -> dict:
    over = [json.loads(line) for line in (runs / NAME / "journal.jsonl").read_text().splitlines()]
    return [entry for entry in over if entry["what"] == "over"][-1]


def steps(kubelet: Kubelet) -> float:
    """Steps of trainer 0, by its metrics; 0 before it serves any."""
    host = kubelet.hosts["trainer-0"]
    script = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1], timeout=3).read().decode())"
    url = f"http://{host.address}:9400/metrics"
    asked = [*kubelet.hosts["coordinator-0"].prefix, sys.executable, "-c", script, url]
    text = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    match = re.search(r"^paddlewheel_trainer_steps_total\{.*\} (\S+)$", text, re.MULTILINE)
    return float(match.group(1)) if match else 0.0


def test_pods_that_come_late_over_a_bad_network_train_everything(
    cluster: Callable, eventually: Callable[..., None]
) -> None:
    """The coordinator's name resolves late, servers start late; packets take 5 to 7 ms, one in a hundred is lost."""
    kubelet, net = cluster(train={"epochs": 2})
    net.impair(delay_ms=5, jitter_ms=2, loss=0.01)
    for host in net.hosts.values():
        host.learn({})
    for rank in range(2):
        kubelet.start("trainer", rank)
    kubelet.start("coordinator")
    time.sleep(4)
    assert not any(pod.process.poll() is not None for pod in kubelet.pods), kubelet.logs()
    for host in net.hosts.values():
        host.learn({f"{NAME}-coordinator": ADDRESSES["coordinator-0"]})
    time.sleep(4)
    for rank in range(2):
        kubelet.start("pserver", rank)
    eventually(lambda: steps(kubelet) > 0, seconds=150, what="metrics of trainer 0 across the network")
    codes = kubelet.wait(200)
    assert set(codes.values()) == {0}, f"{codes}\n{kubelet.logs()}"
    over = result(kubelet.volumes["runs"])
    assert over["result"]["rows"] == 2 * 16_000
    assert (kubelet.volumes["runs"] / NAME / "checkpoints" / "LATEST").is_file()


def test_a_pod_that_is_told_to_go_stops_the_job_and_all_pods_come_back(
    cluster: Callable, eventually: Callable[..., None]
) -> None:
    kubelet, _ = cluster(train={"epochs": 25})
    kubelet.start_all()
    eventually(lambda: steps(kubelet) > 40, seconds=150, what="training")
    (victim,) = [pod for pod in kubelet.pods if pod.name == "pserver 1"]
    inner = process_1(victim.process.pid)
    grace = kubelet.template("pserver")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    started = time.monotonic()
    os.kill(inner, signal.SIGTERM)
    codes = kubelet.wait(grace)
    assert set(codes.values()) == {143}, f"{codes}\n{kubelet.logs()}"
    assert time.monotonic() - started < grace
    assert {kubelet.action(pod, codes[pod.name]) for pod in kubelet.pods} == {"Ignore"}
    saved = (kubelet.volumes["runs"] / NAME / "checkpoints" / "LATEST").read_text()
    assert int(saved.strip().removeprefix("step-")) >= 40, "the stop saved a checkpoint"
    kubelet.pods.clear()
    kubelet.start_all()
    codes = kubelet.wait(250)
    assert set(codes.values()) == {0}, f"{codes}\n{kubelet.logs()}"
    assert result(kubelet.volumes["runs"])["result"]["rows"] == 25 * 16_000


def process_1(pid: int) -> int:
    """The container's process 1 (tini) below `ip netns exec`, which became it by exec."""
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "tini"
    return pid


def test_a_mistake_in_the_job_ends_every_pod_with_the_code_that_no_policy_repeats(cluster: Callable) -> None:
    kubelet, _ = cluster(data={"labels": ["clicked"]})
    kubelet.start_all()
    codes = kubelet.wait(120)
    assert set(codes.values()) == {64}, f"{codes}\n{kubelet.logs()}"
    assert {kubelet.action(pod, codes[pod.name]) for pod in kubelet.pods} == {"FailJob"}
    (coordinator,) = [pod for pod in kubelet.pods if pod.role == "coordinator"]
    assert "clicked" in coordinator.log.read_text()
