"""A job -> Kubernetes objects, as plain data.

Every role is a Job: servers and trainers end with the work, and only Jobs can tell failures apart by exit code
(podFailurePolicy). Servers and trainers are indexed, so each pod has a rank; the coordinator is one pod behind a
Service. Only the coordinator's name has to resolve: the roles tell it their pod addresses.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from paddlewheel.deploy.checks.sizing import Sizing, size
from paddlewheel.deploy.kubernetes.options import DATA_PATH, RUNS_PATH, KubernetesOptions
from paddlewheel.trainer.agent.paddle_environment import COMPUTE_THREADS
from paddlewheel.trainer.job.config import JobConfig, check_server_folders
from paddlewheel.trainer.job.errors import ConfigError, Problem
from paddlewheel.trainer.job.exit_codes import EX_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED

Object = dict[str, Any]

_GRPC, _HEALTH, _METRICS, _CHILD = 7070, 7071, 9400, 7072
"""Ports: the coordinator's, every agent's health service, /metrics, and what a role's worker listens on."""
_USER = 10_001
_JOB_FOLDER, _SECRETS = "/etc/paddlewheel", "/run/secrets/paddlewheel"
_GRACE_MARGIN_SECONDS = 15
_INDEX = "batch.kubernetes.io/job-completion-index"
_MAX_NAME = 45
"""Room for '-coordinator', '-pserver-9999' and the suffix of a pod within the 63 characters of a label."""


class UnreachablePathError(ConfigError):
    """The job names a path that no pod would see."""


def render(job: JobConfig, options: KubernetesOptions) -> list[Object]:
    """Every object of the job, in an order in which they can be created.

    Raises:
        UnreachablePathError: a path of the job is outside of what is mounted.
        SizingError: `options.keys` names a table that the job does not use.
    """
    return _Renderer(job, options).objects()


def to_yaml(objects: Sequence[Object]) -> str:
    """As one stream of documents for `kubectl apply -f -`."""
    return "".join(f"---\n{_dump(item)}" for item in objects)


def write_folder(objects: Sequence[Object], folder: Path) -> list[Path]:
    """One file an object and a kustomization.yaml: a base for `kubectl apply -k` and for overlays. Returns the files.

    Overlays live beside the folder: it is written anew whenever the job changes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for item in objects:
        path = folder / f"{item['kind'].lower()}-{item['metadata']['name']}.yaml"
        path.write_text(_dump(item), encoding="utf-8")
        written.append(path)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [path.name for path in written],
    }
    path = folder / "kustomization.yaml"
    path.write_text(_dump(kustomization), encoding="utf-8")
    return [*written, path]


def object_name(job_name: str) -> str:
    """A DNS label for the job: its name, with a short hash where that had to change."""
    name = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")
    if name == job_name and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:6]
    return f"{name[: _MAX_NAME - 7].rstrip('-') or 'job'}-{digest}"


class _Literal(str):
    """A text that YAML shows line by line."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Block style, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Literal, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def _dump(item: Object) -> str:
    text: str = yaml.dump(item, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Renderer:
    def __init__(self, job: JobConfig, options: KubernetesOptions) -> None:
        self._options = options
        self._name = object_name(job.name)
        self._job = _for_pods(job, self._name, options)
        self._sizing: Sizing = size(job, options.keys)
        self._grace = math.ceil(
            job.control.stop_seconds
            + job.control.final_checkpoint_timeout_seconds
            + job.control.drain_seconds
            + _GRACE_MARGIN_SECONDS
        )

    def objects(self) -> list[Object]:
        options, cluster = self._options, self._job.cluster
        found = [self._service_account(), self._config()]
        if options.runs_claim is None:
            found.append(self._claim())
        found += [
            self._service(),
            *self._network_policies(),
            self._disruption_budget(),
        ]
        if options.gang == "volcano":
            found.append(self._pod_group())
        found += [
            self._role("coordinator", None),
            self._role("pserver", cluster.servers),
            self._role("trainer", cluster.trainers),
        ]
        if options.operator:
            found += [self._pod_monitor(), self._prometheus_rule()]
        return found

    # -- parts

    def _labels(self, component: str | None = None) -> dict[str, str]:
        found = {"app.kubernetes.io/name": "paddlewheel", "paddlewheel.dev/job": self._name}
        if component is not None:
            found["app.kubernetes.io/component"] = component
        return found

    def _object(self, api: str, kind: str, name: str, component: str | None = None, **fields: Any) -> Object:
        metadata: dict[str, Any] = {"name": name}
        if self._options.namespace is not None:
            metadata["namespace"] = self._options.namespace
        metadata["labels"] = {**self._labels(component), "app.kubernetes.io/managed-by": "paddlewheel"}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}

    def _service_account(self) -> Object:
        return self._object("v1", "ServiceAccount", self._name, automountServiceAccountToken=False)

    def _config(self) -> Object:
        return self._object("v1", "ConfigMap", f"{self._name}-job", data={"job.yaml": _Literal(self._job.to_yaml())})

    def _claim(self) -> Object:
        spec: dict[str, Any] = {
            # Servers write their parts of a checkpoint side by side, and read those of others after a change of number.
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": _mebibytes(self._sizing.storage_bytes)}},
        }
        if self._options.storage_class is not None:
            spec["storageClassName"] = self._options.storage_class
        return self._object("v1", "PersistentVolumeClaim", self._runs_claim, spec=spec)

    @property
    def _runs_claim(self) -> str:
        return self._options.runs_claim or f"{self._name}-runs"

    def _service(self) -> Object:
        spec = {
            "selector": self._labels("coordinator"),
            # Roles wait for the coordinator, so its name may resolve before it is ready.
            "publishNotReadyAddresses": True,
            "ports": [
                {"name": "grpc", "port": _GRPC, "targetPort": "grpc", "appProtocol": "grpc"},
                {"name": "metrics", "port": _METRICS, "targetPort": "metrics"},
            ],
        }
        return self._object("v1", "Service", f"{self._name}-coordinator", "coordinator", spec=spec)

    def _network_policies(self) -> list[Object]:
        """Paddle's server has no authentication, and its port can change its flags: it is for the job's pods only."""
        monitoring = self._options.monitoring_namespace
        scraper: dict[str, Any] = (
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": monitoring}}}
            if monitoring is not None
            else {"namespaceSelector": {}}
        )
        pods = {"matchLabels": self._labels()}
        inside = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
        metrics = {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [scraper], "ports": [{"protocol": "TCP", "port": _METRICS}]}],
        }
        return [
            self._object("networking.k8s.io/v1", "NetworkPolicy", f"{self._name}-inside", spec=inside),
            self._object("networking.k8s.io/v1", "NetworkPolicy", f"{self._name}-metrics", spec=metrics),
        ]

    def _disruption_budget(self) -> Object:
        """One pod at a time may be evicted. (For pods of Jobs only a whole number as minAvailable works.)"""
        cluster = self._job.cluster
        spec = {
            "minAvailable": cluster.servers + cluster.trainers,
            "selector": {"matchLabels": self._labels()},
        }
        return self._object("policy/v1", "PodDisruptionBudget", self._name, spec=spec)

    def _pod_group(self) -> Object:
        cluster = self._job.cluster
        spec: dict[str, Any] = {"minMember": 1 + cluster.servers + cluster.trainers}
        if self._options.queue is not None:
            spec["queue"] = self._options.queue
        return self._object("scheduling.volcano.sh/v1beta1", "PodGroup", self._name, spec=spec)

    # -- roles

    def _role(self, role: str, number: int | None) -> Object:
        options = self._options
        spec: dict[str, Any] = {
            **({} if number is None else {"completionMode": "Indexed", "completions": number, "parallelism": number}),
            **(
                {"backoffLimit": options.retries}
                if number is None
                else {"backoffLimitPerIndex": options.retries, "maxFailedIndexes": 0}
            ),
            # Never two pods of one rank.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": self._failure_rules(role)},
            "ttlSecondsAfterFinished": options.keep_seconds,
            "template": {"metadata": self._pod_metadata(role), "spec": self._pod(role)},
        }
        return self._object("batch/v1", "Job", f"{self._name}-{role}", role, spec=spec)

    def _failure_rules(self, role: str) -> list[dict[str, Any]]:
        """64 (fix the job) ends the Job; an eviction and a stop by a signal cost no retry; anything else costs one."""

        def codes(action: str, *values: int) -> dict[str, Any]:
            return {
                "action": action,
                "onExitCodes": {"containerName": role, "operator": "In", "values": sorted(values)},
            }

        return [
            codes("FailJob", EX_USAGE),
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            codes("Ignore", EXIT_INTERRUPTED, EXIT_TERMINATED),
        ]

    def _pod_metadata(self, role: str) -> dict[str, Any]:
        options, cluster = self._options, self._job.cluster
        labels = {**self._labels(role)}
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(_METRICS),
            "prometheus.io/scheme": "https" if options.http_tls_secret else "http",
            # A new job file means new pods.
            "paddlewheel.dev/job-hash": hashlib.sha256(self._job.to_yaml().encode()).hexdigest()[:16],
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        }
        if options.gang == "volcano":
            annotations["scheduling.k8s.io/group-name"] = self._name
        if options.gang == "kueue":
            labels["kueue.x-k8s.io/queue-name"] = str(options.queue)
            labels["kueue.x-k8s.io/pod-group-name"] = self._name
            annotations["kueue.x-k8s.io/pod-group-total-count"] = str(1 + cluster.servers + cluster.trainers)
            annotations["kueue.x-k8s.io/retriable-in-group"] = "true"
        return {"labels": labels, "annotations": annotations}

    def _pod(self, role: str) -> dict[str, Any]:
        options = self._options
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "serviceAccountName": self._name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": self._grace,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(role)],
            "volumes": [volume for volume, _ in self._volumes(role)],
        }
        if options.gang == "volcano":
            pod["schedulerName"] = "volcano"
        if options.image_pull_secret is not None:
            pod["imagePullSecrets"] = [{"name": options.image_pull_secret}]
        if options.priority_class is not None:
            pod["priorityClassName"] = options.priority_class
        if role != "coordinator":
            if options.node_selector:
                pod["nodeSelector"] = dict(options.node_selector)
            pod["affinity"] = {"podAntiAffinity": self._apart(role)}
        if role == "trainer" and options.gpus_per_trainer:
            pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        return pod

    def _apart(self, role: str) -> dict[str, Any]:
        """Servers, and trainers, on different machines if there are enough: they share memory bandwidth and network."""
        term = {
            "weight": 100,
            "podAffinityTerm": {
                "labelSelector": {"matchLabels": self._labels(role)},
                "topologyKey": "kubernetes.io/hostname",
            },
        }
        return {"preferredDuringSchedulingIgnoredDuringExecution": [term]}

    def _container(self, role: str) -> dict[str, Any]:
        port = _GRPC if role == "coordinator" else _HEALTH
        arguments = ["role", role]
        if role == "coordinator":
            arguments += [f"{_JOB_FOLDER}/job.yaml", "--listen", f"0.0.0.0:{_GRPC}"]
        ports = [
            {"name": "grpc" if role == "coordinator" else "health", "containerPort": port},
            {"name": "metrics", "containerPort": _METRICS},
        ]
        container: dict[str, Any] = {
            "name": role,
            "image": self._options.image,
            "args": arguments,
            "env": self._environment(role),
            "ports": ports if role == "coordinator" else [*ports, {"name": "worker", "containerPort": _CHILD}],
            "resources": self._resources(role),
            "startupProbe": {**self._probe(port, ""), "periodSeconds": 2, "failureThreshold": 60},
            "livenessProbe": {**self._probe(port, ""), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
            "readinessProbe": {
                **self._probe(port, "" if role == "coordinator" else "ready"),
                "periodSeconds": 5,
                "timeoutSeconds": 3,
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [mount for _, mount in self._volumes(role)],
            # The last lines of the log are the cause when a pod fails.
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
        if self._options.environment_secret is not None:
            container["envFrom"] = [{"secretRef": {"name": self._options.environment_secret}}]
        return container

    def _probe(self, port: int, service: str) -> dict[str, Any]:
        """The gRPC health service; the kubelet does not speak TLS to it, so then it only sees that the port is open."""
        if self._options.tls_secret is not None:
            return {"tcpSocket": {"port": port}}
        return {"grpc": {"port": port, "service": service}}

    def _environment(self, role: str) -> list[dict[str, Any]]:
        def field(name: str, path: str) -> dict[str, Any]:
            return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

        found: list[dict[str, Any]] = [
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 -- an emptyDir of the pod's own
            {"name": "PADDLEWHEEL_METRICS", "value": f"0.0.0.0:{_METRICS}"},
        ]
        if role != "coordinator":
            found += [
                {"name": "PADDLEWHEEL_COORDINATOR", "value": f"{self._name}-coordinator:{_GRPC}"},
                {"name": "PADDLEWHEEL_JOB_NAME", "value": self._job.name},
                {"name": "PADDLEWHEEL_HEALTH", "value": f"0.0.0.0:{_HEALTH}"},
                {"name": "PADDLEWHEEL_PORT", "value": str(_CHILD)},
                field("PADDLEWHEEL_HOST", "status.podIP"),
                field("PADDLEWHEEL_RANK", f"metadata.annotations['{_INDEX}']"),
            ]
        if role == "trainer":
            limit = {"resourceFieldRef": {"containerName": role, "resource": "limits.cpu", "divisor": "1"}}
            found += [{"name": name, "valueFrom": limit} for name in COMPUTE_THREADS]
        options = self._options
        if options.token_secret is not None:
            found.append({"name": "PADDLEWHEEL_TOKEN_FILE", "value": f"{_SECRETS}/token/token"})
        if options.tls_secret is not None:
            found += [
                {"name": f"PADDLEWHEEL_TLS_{name}", "value": f"{_SECRETS}/tls/{file}"}
                for name, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key"))
            ]
            found.append({"name": "PADDLEWHEEL_TLS_NAME", "value": f"{self._name}-coordinator"})
        if options.http_secret is not None:
            found += [
                {
                    "name": "PADDLEWHEEL_HTTP_USER",
                    "valueFrom": {"secretKeyRef": {"name": options.http_secret, "key": "username"}},
                },
                {"name": "PADDLEWHEEL_HTTP_PASSWORD_FILE", "value": f"{_SECRETS}/http/password"},
            ]
        if options.http_tls_secret is not None:
            found += [
                {"name": f"PADDLEWHEEL_HTTP_TLS_{name}", "value": f"{_SECRETS}/http-tls/{file}"}
                for name, file in (("CERT", "tls.crt"), ("KEY", "tls.key"))
            ]
        return found

    def _resources(self, role: str) -> dict[str, Any]:
        options, sizing = self._options, self._sizing
        cpus, memory = {
            "coordinator": (0.5, 512 << 20),
            "pserver": (options.server_cpus, options.server_memory_bytes or sizing.server_memory_bytes),
            "trainer": (options.trainer_cpus, options.trainer_memory_bytes or sizing.trainer_memory_bytes),
        }[role]
        if role == "trainer":
            memory += sizing.shared_memory_bytes  # what lies in /dev/shm counts
        amounts = {"cpu": _cpus(cpus), "memory": _mebibytes(memory)}
        limits = dict(amounts)
        if role == "coordinator":
            limits["cpu"] = "2"
        if role == "trainer" and options.gpus_per_trainer:
            limits["nvidia.com/gpu"] = str(options.gpus_per_trainer)
        return {"requests": amounts, "limits": limits}

    def _volumes(self, role: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Volumes, and where they are mounted."""
        options = self._options

        def secret(name: str, secret_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
            volume = {"name": name, "secret": {"secretName": secret_name, "defaultMode": 0o440}}
            return volume, {"name": name, "mountPath": f"{_SECRETS}/{name}", "readOnly": True}

        found: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "tmp", "mountPath": "/tmp"}),  # noqa: S108
            (
                {"name": "runs", "persistentVolumeClaim": {"claimName": self._runs_claim}},
                {"name": "runs", "mountPath": RUNS_PATH},
            ),
        ]
        if role == "coordinator":
            found.append(
                (
                    {"name": "job", "configMap": {"name": f"{self._name}-job"}},
                    {"name": "job", "mountPath": _JOB_FOLDER, "readOnly": True},
                )
            )
        if role == "trainer":
            size_limit = _mebibytes(self._sizing.shared_memory_bytes)
            found.append(
                (
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size_limit}},
                    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
                )
            )
        if options.data_claim is not None and role != "pserver":
            found.append(
                (
                    {"name": "data", "persistentVolumeClaim": {"claimName": options.data_claim, "readOnly": True}},
                    {"name": "data", "mountPath": DATA_PATH, "readOnly": True},
                )
            )
        for name, secret_name in (
            ("token", options.token_secret),
            ("tls", options.tls_secret),
            ("http", options.http_secret),
            ("http-tls", options.http_tls_secret),
        ):
            if secret_name is not None:
                found.append(secret(name, secret_name))
        return found

    # -- the Prometheus operator

    def _pod_monitor(self) -> Object:
        options = self._options
        meta = "__meta_kubernetes_pod"
        sources = [
            f"{meta}_label_paddlewheel_dev_job",
            f"{meta}_label_app_kubernetes_io_component",
            f"{meta}_label_batch_kubernetes_io_job_completion_index",
        ]
        endpoint: dict[str, Any] = {
            "port": "metrics",
            "interval": "10s",
            "scheme": "https" if options.http_tls_secret else "http",
            "relabelings": [
                {"sourceLabels": sources, "separator": "-", "targetLabel": "instance"},
                {"targetLabel": "job", "replacement": "paddlewheel"},
            ],
        }
        if options.http_secret is not None:
            endpoint["basicAuth"] = {key: {"name": options.http_secret, "key": key} for key in ("username", "password")}
        if options.http_tls_secret is not None:
            endpoint["tlsConfig"] = {
                "ca": {"secret": {"name": options.http_tls_secret, "key": "ca.crt"}},
                "serverName": f"{self._name}-coordinator",
            }
        spec = {"selector": {"matchLabels": self._labels()}, "podMetricsEndpoints": [endpoint]}
        return self._object("monitoring.coreos.com/v1", "PodMonitor", self._name, spec=spec)

    def _prometheus_rule(self) -> Object:
        rules = yaml.safe_load(
            (resources.files("paddlewheel.deploy.monitoring") / "rules.yaml").read_text(encoding="utf-8")
        )
        # The same for every job, so all jobs of a namespace share one.
        found = self._object("monitoring.coreos.com/v1", "PrometheusRule", "paddlewheel", spec=rules)
        del found["metadata"]["labels"]["paddlewheel.dev/job"]
        return found


def _for_pods(job: JobConfig, name: str, options: KubernetesOptions) -> JobConfig:
    """The job as the coordinator's pod reads it: its run folder on the shared volume, its paths where pods see them."""
    mounted = [RUNS_PATH, *([DATA_PATH] if options.data_claim else [])]
    problems = []
    places: list[tuple[str, str | Sequence[str] | None, list[str]]] = [
        ("data.train", job.data.train, mounted),
        ("data.eval", job.data.eval, mounted),
        ("data.statistics", job.data.statistics, mounted),
        ("data.quarantine_directory", job.data.quarantine_directory, [RUNS_PATH]),
        ("checkpoint.directory", job.checkpoint.directory, [RUNS_PATH]),
        ("checkpoint.staging", job.checkpoint.staging, [RUNS_PATH]),
        ("warm_start.source", job.warm_start.source if job.warm_start else None, mounted),
    ]
    for key, value, roots in places:
        for path in [value] if isinstance(value, str) else value or []:
            if "://" in path or any(Path(path).is_relative_to(root) for root in roots):
                continue
            mount = "" if DATA_PATH in roots or len(roots) < len(mounted) else f" (--data-claim mounts {DATA_PATH})"
            message = f"no pod sees {path}: write where it is inside the containers, under {' or '.join(roots)}{mount}"
            problems.append(Problem(key, message))
    if problems:
        raise UnreachablePathError(job.name, problems)
    placed = job.model_copy(update={"run_dir": f"{RUNS_PATH}/{name}"})
    check_server_folders(placed)
    return placed


def _mebibytes(value: int) -> str:
    return f"{math.ceil(value / (1 << 20))}Mi"


def _cpus(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{round(1000 * value)}m"


__all__ = ["UnreachablePathError", "object_name", "render", "to_yaml", "write_folder"]
