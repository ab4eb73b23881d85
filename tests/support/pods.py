"""A kubelet and a Job controller in miniature: runs the pods that `deploy k8s` renders, as real processes.

Each pod is a network namespace with an address; its process has the user, the read-only root, the mounts, the
environment and process 1 of the manifest. What is not there: images (this environment's Python stands for them) and
memory limits.
Reading files is allowed beyond the user's rights (CAP_DAC_READ_SEARCH), so that any Python may be used.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.networks import Host

_MOUNT_POINTS = ("/runs", "/data", "/etc/paddlewheel")
_SETUP = """
set -e
mount --make-rprivate /
mount --bind /tmp /tmp
mount -t tmpfs -o size={shm} tmpfs /dev/shm
{binds}
mount -o remount,bind,ro /
exec setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs \\
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search \\
    -- tini -- {command}
"""


@dataclass
class Pod:
    """One started container."""

    role: str
    rank: int
    host: Host
    process: subprocess.Popen
    log: Path

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass
class Kubelet:
    """Starts pods of a rendered job.

    Attributes:
        objects: what render returned.
        hosts: a host for each pod, by name such as pserver-0.
        volumes: host folders by what they stand for: runs, data.
    """

    objects: list[dict[str, Any]]
    hosts: dict[str, Host]
    volumes: dict[str, Path]
    folder: Path
    pods: list[Pod] = field(default_factory=list)

    def template(self, role: str) -> dict[str, Any]:
        (job,) = [o for o in self.objects if o["kind"] == "Job" and o["metadata"]["name"].endswith(role)]
        return job

    def start(self, role: str, rank: int = 0) -> Pod:
        spec = self.template(role)["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        host = self.hosts[f"{role}-{rank}"]
        environment = {e["name"]: self._value(e, host, rank, container) for e in container["env"]}
        shm = next((v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "shm"), "64Mi")
        paddlewheel = Path(sys.executable).with_name("paddlewheel")
        script = _SETUP.format(
            shm=shm.replace("Mi", "m"),
            binds="\n".join(self._binds(spec, container)),
            user=spec["securityContext"]["runAsUser"],
            command=shlex.join([str(paddlewheel), *container["args"]]),
        )
        log = self.folder / f"{role}-{rank}.log"
        kept = {name: value for name, value in os.environ.items() if name in {"PATH", "PADDLEWHEEL_TEST_RUN"}}
        with log.open("ab") as output:
            process = host.run(
                ["unshare", "--mount", "sh", "-c", script],
                env={**kept, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pod = Pod(role, rank, host, process, log)
        self.pods.append(pod)
        return pod

    def _value(self, variable: dict[str, Any], host: Host, rank: int, container: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            return host.address if path == "status.podIP" else str(rank)
        amount = container["resources"]["limits"]["cpu"]
        return "1" if amount.endswith("m") else amount

    def _binds(self, spec: dict[str, Any], container: dict[str, Any]) -> list[str]:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        lines = []
        for mount in container["volumeMounts"]:
            name, place = mount["name"], mount["mountPath"]
            if name == "job":
                source = self.folder / "config"
                source.mkdir(exist_ok=True)
                (config,) = [o for o in self.objects if o["kind"] == "ConfigMap"]
                (source / "job.yaml").write_text(config["data"]["job.yaml"])
            elif "persistentVolumeClaim" in volumes[name]:
                source = self.volumes[name]
            else:
                continue  # /tmp and /dev/shm are there
            lines.append(f"mount --bind {shlex.quote(str(source))} {place}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {place}")
        return lines

    def start_all(self) -> None:
        for role in ("coordinator", "pserver", "trainer"):
            for rank in range(self.template(role)["spec"].get("completions", 1)):
                self.start(role, rank)

    def wait(self, seconds: float) -> dict[str, int]:
        """Exit codes of all pods by name, once all have ended."""
        deadline = time.monotonic() + seconds
        codes = {}
        for pod in self.pods:
            try:
                codes[pod.name] = pod.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{pod.name} still runs:\n{self.logs()}") from None
        return codes

    def logs(self, lines: int = 25) -> str:
        """The ends of all logs, for a failed assertion."""
        texts = [
            f"== {p.name}\n" + "\n".join(p.log.read_text(errors="replace").splitlines()[-lines:]) for p in self.pods
        ]
        return "\n".join(texts)

    def action(self, pod: Pod, code: int) -> str:
        """What the Job controller does about the exit code."""
        for rule in self.template(pod.role)["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Complete" if code == 0 else "Count"

    def close(self) -> None:
        """Ends what still runs."""
        for pod in self.pods:
            if pod.process.poll() is None:
                os.killpg(pod.process.pid, 9)
                pod.process.wait(10)


def mount_points() -> list[Path]:
    """Makes the folders that the pods mount over; returns those that were not there and are to be removed."""
    made = []
    for place in map(Path, _MOUNT_POINTS):
        if not place.exists():
            place.mkdir()
            made.append(place)
    return made


def shared_folder(prefix: str) -> Path:
    """A folder that the pods' user may write, as fsGroup makes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o777)
    return folder
