"""The rendered objects: valid for Kubernetes, closed to strangers, and with exit codes that mean what they should."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from paddlewheel.deploy.checks.sizing import size
from paddlewheel.deploy.cli import run
from paddlewheel.deploy.kubernetes import KubernetesOptions, UnreachablePathError, render, to_yaml, write_folder
from paddlewheel.deploy.kubernetes.render import object_name
from paddlewheel.trainer.job.config import JobConfig
from tests.support.needs import require

VERSIONS = ("1.31", "1.34", "1.37")
CUSTOM_KINDS = {"PodGroup", "PodMonitor", "PrometheusRule"}
EVERYTHING = {
    "namespace": "ads",
    "storage_class": "shared",
    "keys": {"default": 200_000_000},
    "gpus_per_trainer": 2,
    "gang": "volcano",
    "queue": "research",
    "token_secret": "token",
    "tls_secret": "tls",
    "http_secret": "http",
    "http_tls_secret": "http-tls",
    "environment_secret": "store",
    "monitoring_namespace": "monitoring",
    "operator": True,
    "node_selector": {"pool": "train"},
    "image_pull_secret": "pull",
    "priority_class": "batch",
}


def job(**changes: Any) -> JobConfig:
    raw = {
        "name": "criteo-deepfm",
        "data": {
            "train": "/data/train",
            "eval": "/data/eval",
            "labels": ["click"],
            "sparse": [{"name": "C1"}, {"name": "C2", "table": "item"}],
        },
        "tables": {"default": {"width": 16}, "item": {"width": 32, "optimizer": {"rule": "adam"}}},
        "cluster": {"servers": 3, "trainers": 4},
        "checkpoint": {"every_minutes": 10},
    }
    return JobConfig.parse({**raw, **changes})


def rendered(config: JobConfig | None = None, **options: Any) -> list[dict[str, Any]]:
    given = {"image": "registry.example/paddlewheel:1", "data_claim": "clicks", **options}
    return render(config or job(), KubernetesOptions(**given))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod template by role."""
    found = {}
    for item in of_kind(objects, "Job"):
        template = item["spec"]["template"]
        found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


VARIANTS = {
    "plain": {},
    "no data claim": {
        "config": job(data={**job().data.model_dump(), "train": "s3://b/t", "eval": ()}),
        "data_claim": None,
    },
    "one of each": {"config": job(cluster={"servers": 1, "trainers": 1})},
    "everything": EVERYTHING,
    "kueue": {"gang": "kueue", "queue": "research"},
    "existing claim": {"runs_claim": "runs"},
    "fractions": {"server_cpus": 0.5, "trainer_cpus": 7.5, "server_memory_bytes": 5 << 30},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_strictly(variant: str, version: str) -> None:
    objects = rendered(**VARIANTS[variant])
    for item in objects:
        if item["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(item, version, strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    assert list(yaml.safe_load_all(to_yaml(objects))) == json.loads(json.dumps(objects))


def test_a_wrong_object_would_be_refused() -> None:
    (item,) = of_kind(rendered(), "PodDisruptionBudget")
    item["spec"]["minAvailabel"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)


def kustomize(folder: Path) -> list[dict[str, Any]]:
    require("kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_the_folder_is_a_base_for_kubectl_and_for_overlays(tmp_path: Path) -> None:
    objects = rendered(**EVERYTHING)
    files = write_folder(objects, tmp_path / "base")
    assert len(files) == len(objects) + 1
    built = kustomize(tmp_path / "base")
    key = lambda item: (item["kind"], item["metadata"]["name"])  # noqa: E731
    assert sorted(built, key=key) == sorted(json.loads(json.dumps(objects)), key=key)

    overlay = tmp_path / "night"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": ["../base"],
                "namespace": "night",
                "images": [{"name": "registry.example/paddlewheel", "newTag": "2"}],
                "patches": [
                    {
                        "target": {"kind": "Job", "name": "criteo-deepfm-pserver"},
                        "patch": json.dumps(
                            [
                                {
                                    "op": "replace",
                                    "path": "/spec/template/spec/containers/0/resources/limits/memory",
                                    "value": "99Gi",
                                }
                            ]
                        ),
                    }
                ],
            }
        )
    )
    template = pods(kustomize(overlay))["pserver"]["spec"]["containers"][0]
    assert (template["image"], template["resources"]["limits"]["memory"]) == ("registry.example/paddlewheel:2", "99Gi")


def test_a_users_own_model_is_looked_for_beside_the_job_file_in_the_containers_too(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(job().to_yaml())
    for override, folder in (("", None), ("model.folder=/models", "/models")):
        out = tmp_path / f"out{folder is None}"
        words = [
            "deploy",
            "k8s",
            str(path),
            "--image",
            "x:1",
            "--data-claim",
            "c",
            "--keys",
            "item=1m",
            "--out",
            str(out),
        ]
        sets = ["--set", "model={kind: 'my_models:Net'}", *(["--set", override] if override else [])]
        assert run([*words, *sets]) == 0
        objects = [item for file in out.glob("*.yaml") for item in yaml.safe_load_all(file.read_text())]
        [text] = [
            item["data"]["job.yaml"] for item in objects if item["kind"] == "ConfigMap" and "job.yaml" in item["data"]
        ]
        model = yaml.safe_load(text)["model"]
        assert model["folder"] == folder
        assert (model["sha256"] is None) == (folder is not None)  # of the file that is here


def test_the_command_prints_what_kubectl_takes(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job().to_yaml())
    command = [
        sys.executable,
        "-m",
        "paddlewheel.deploy.cli",
        "deploy",
        "k8s",
        str(path),
        "--image",
        "x:1",
        "--data-claim",
        "clicks",
    ]
    done = subprocess.run([*command, "--keys", "item=1.5g"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {item["kind"] for item in yaml.safe_load_all(done.stdout)} >= {"Job", "Service", "NetworkPolicy"}
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True)
    assert str(tmp_path / "out" / "kustomization.yaml") in done.stdout
    for wrong, message in {
        ("--keys", "itm=5m"): "no table 'itm'",
        ("--keys", "item=many"): "a number such as",
        ("--keys", "item"): "write NAME=VALUE",
        ("--server-memory", "32GB"): "such as 32Gi",
        ("--gang", "kueue"): "LocalQueue",
    }.items():
        done = subprocess.run([*command, *wrong], capture_output=True, text=True, check=False)
        assert done.returncode == 64, (wrong, done.stdout)
        assert message in done.stderr, (wrong, done.stderr)


# ------------------------------------------------------------------------------------------------------------ security


@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_pods_meet_the_restricted_standard(variant: str) -> None:
    for role, template in pods(rendered(**VARIANTS[variant])).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, role
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert all("hostPort" not in port for port in container["ports"])
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][kind])


def test_secrets_are_mounted_or_referred_to_and_never_written_out() -> None:
    objects = rendered(**EVERYTHING)
    assert not of_kind(objects, "Secret")
    for template in pods(objects).values():
        (container,) = template["spec"]["containers"]
        mounted = {v["secret"]["secretName"] for v in template["spec"]["volumes"] if "secret" in v}
        assert mounted == {"token", "tls", "http", "http-tls"}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        for name in mounted:
            assert mounts[name]["readOnly"] is True
        files = [e["value"] for e in container["env"] if str(e.get("value", "")).startswith("/run/secrets")]
        assert len(files) == 7
        for file in files:
            assert any(file.startswith(mount["mountPath"] + "/") for mount in mounts.values()), file


def allowed(objects: list[dict[str, Any]], *, to: str, port: int, source: dict[str, str], namespace: str) -> bool:
    """What a NetworkPolicy controller would decide about ingress; the job's own namespace is `here`."""

    def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        assert set(selector) <= {"matchLabels"}
        return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())

    target = pods(objects)[to]["metadata"]["labels"]
    policies = [p for p in of_kind(objects, "NetworkPolicy") if matches(p["spec"]["podSelector"], target)]
    if not policies:
        return True
    for rule in itertools.chain.from_iterable(policy["spec"].get("ingress", []) for policy in policies):
        if "ports" in rule and port not in [p["port"] for p in rule["ports"]]:
            continue
        for peer in rule.get("from", [{}]):
            if "namespaceSelector" in peer:
                same = matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
            else:
                same = namespace == "here"
            if same and matches(peer.get("podSelector", {}), source):
                return True
    return False


def test_only_the_jobs_pods_reach_a_server_and_only_prometheus_its_metrics() -> None:
    objects = rendered(monitoring_namespace="monitoring")
    own = pods(objects)["trainer"]["metadata"]["labels"]
    other_job = {**own, "paddlewheel.dev/job": "another"}
    for to in ("pserver", "trainer", "coordinator"):
        for port in (7070, 7071, 7072, 40_000):
            assert allowed(objects, to=to, port=port, source=own, namespace="here"), "gloo uses any port"
            assert not allowed(objects, to=to, port=port, source=other_job, namespace="here")
            assert not allowed(objects, to=to, port=port, source=own, namespace="elsewhere")
            assert not allowed(objects, to=to, port=port, source={}, namespace="monitoring")
        assert allowed(objects, to=to, port=9400, source={}, namespace="monitoring")
        assert not allowed(objects, to=to, port=9400, source=other_job, namespace="here")
    anyone = rendered()
    assert allowed(anyone, to="pserver", port=9400, source={}, namespace="elsewhere")
    assert not allowed(anyone, to="pserver", port=7072, source={}, namespace="elsewhere")


# ------------------------------------------------------------------------------------------------------------- failure


def action_of(item: dict[str, Any], code: int, *, evicted: bool = False) -> str:
    """What the Job controller does about a pod that ended with this code."""
    for rule in item["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            on = rule["onExitCodes"]
            containers = {c["name"] for c in item["spec"]["template"]["spec"]["containers"]}
            assert on["containerName"] in containers
            if code in on["values"]:
                return str(rule["action"])
        elif evicted:
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize("role", ["coordinator", "pserver", "trainer"])
def test_exit_codes(role: str) -> None:
    (item,) = [j for j in of_kind(rendered(), "Job") if j["metadata"]["name"].endswith(role)]
    assert item["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert action_of(item, 64) == action_of(item, 64, evicted=True) == "FailJob", "no restart loops on a mistake"
    assert action_of(item, 75) == action_of(item, 137) == action_of(item, 1) == "Count"
    assert action_of(item, 143) == action_of(item, 130) == "Ignore", "an ordered stop costs no retry"
    assert action_of(item, 137, evicted=True) == "Ignore"
    limit = item["spec"].get("backoffLimitPerIndex", item["spec"].get("backoffLimit"))
    assert limit == 10


def test_pods_have_time_for_a_checkpoint_before_they_are_killed() -> None:
    control = {"stop_seconds": 20, "final_checkpoint_timeout_seconds": 300, "drain_seconds": 7}
    for template in pods(rendered(job(control=control))).values():
        assert template["spec"]["terminationGracePeriodSeconds"] >= 327 + 10


def test_one_pod_at_a_time_is_evicted() -> None:
    objects = rendered()
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    total = 1 + sum(j["spec"].get("completions", 0) for j in of_kind(objects, "Job"))
    assert budget["spec"]["minAvailable"] == total - 1 == 7


def test_selectors_find_what_they_are_for() -> None:
    objects = rendered(operator=True)
    (service,) = of_kind(objects, "Service")
    templates = pods(objects)
    assert service["spec"]["selector"].items() <= templates["coordinator"]["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= templates["trainer"]["metadata"]["labels"].items()
    named = {port["name"]: port["containerPort"] for port in templates["coordinator"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(named)
    environment = {e["name"]: e.get("value") for e in templates["pserver"]["spec"]["containers"][0]["env"]}
    assert environment["PADDLEWHEEL_COORDINATOR"] == f"{service['metadata']['name']}:{named['grpc']}"
    (monitor,) = of_kind(objects, "PodMonitor")
    for template in templates.values():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


# --------------------------------------------------------------------------------------------------- names and sizes


def test_names_are_labels_of_dns() -> None:
    names = [
        "criteo-deepfm",
        "Criteo.DeepFM",
        "criteo_deepfm",
        "criteo.deepfm",
        "x" * 63,
        "x" * 62,
        "1-a",
        "A" + "." * 5,
    ]
    made = [object_name(name) for name in names]
    assert made[0] == "criteo-deepfm"
    assert len(set(made)) == len(names), "no two jobs share objects"
    for name in made:
        assert len(f"{name}-coordinator") <= 57
        assert name.strip("-") == name
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize(
    ("changes", "options", "key", "message"),
    [
        ({"checkpoint": {"directory": "/data/c"}}, {}, "checkpoint.directory", "under /runs"),
        ({"checkpoint": {"directory": "s3://b/c", "staging": "/tmp/x"}}, {}, "checkpoint.staging", "under /runs"),
        ({"data": {**job().data.model_dump(), "train": "/home/me/clicks"}}, {}, "data.train", "under /runs or /data"),
        ({}, {"data_claim": None}, "data.train", "--data-claim mounts /data"),
        ({"data": {**job().data.model_dump(), "train": "/database/x"}}, {}, "data.train", "no pod sees"),
    ],
)
def test_paths_that_no_pod_sees_are_refused(changes: dict, options: dict, key: str, message: str) -> None:
    with pytest.raises(UnreachablePathError, match=message) as caught:
        rendered(job(**changes), **options)
    assert caught.value.problems[0].path == key


def test_memory_follows_the_tables() -> None:
    small, large = (size(job(), {"default": number}) for number in (10_000_000, 1_000_000_000))
    assert large.server_memory_bytes > 50 * small.server_memory_bytes / 10
    more_servers = size(job(cluster={"servers": 6, "trainers": 4}), {"default": 1_000_000_000})
    assert 0.45 < more_servers.server_memory_bytes / large.server_memory_bytes < 0.55
    container = pods(rendered(keys={"default": 1_000_000_000}))["pserver"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == f"{large.server_memory_bytes >> 20}Mi"
    (claim,) = of_kind(rendered(keys={"default": 1_000_000_000}), "PersistentVolumeClaim")
    assert int(claim["spec"]["resources"]["requests"]["storage"][:-2]) << 20 > 4 * large.checkpoint_bytes
