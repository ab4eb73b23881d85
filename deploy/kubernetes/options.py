"""What a cluster's owner decides about a job that the job file does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DATA_PATH = "/data"
RUNS_PATH = "/runs"


class OptionsError(ValueError):
    """Options that do not go together."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Choices of `paddlewheel deploy k8s`. None: the object or field is left out, or taken from the sizing.

    Attributes:
        image: container image, built by deploy/docker.
        namespace: written into every object; None leaves it to `kubectl -n` or a kustomization.
        data_claim: claim with the training data, mounted read-only at /data.
        runs_claim: existing claim for checkpoints and logs, mounted at /runs by every role; None renders one.
        storage_class: of the rendered claim, which must offer ReadWriteMany; None: the cluster's default.
        keys: expected keys by table, for the sizing.
        server_cpus, trainer_cpus: processors asked for, each.
        server_memory_bytes, trainer_memory_bytes: replace the sizing.
        gpus_per_trainer: nvidia.com/gpu of each trainer.
        gang: who makes sure that all pods start together.
        queue: queue of Volcano or Kueue.
        token_secret: Secret whose key `token` every role must show to the coordinator.
        tls_secret: Secret with ca.crt, tls.crt and tls.key: mutual TLS between roles and coordinator.
        http_secret: Secret with `username` and `password` of the metrics ports and the status page.
        http_tls_secret: Secret with tls.crt and tls.key for those ports.
        environment_secret: Secret whose keys become variables of every role, such as those of an object store.
        monitoring_namespace: the only other namespace whose pods reach the metrics ports; None: any.
        operator: also render PodMonitor and PrometheusRule of the Prometheus operator.
        node_selector: for servers and trainers.
        image_pull_secret, priority_class: their names.
        retries: how often each role's pod is replaced after a failure that a retry may mend.
        keep_seconds: finished pods are removed after this long.
    """

    image: str
    namespace: str | None = None
    data_claim: str | None = None
    runs_claim: str | None = None
    storage_class: str | None = None
    keys: Mapping[str, int] = field(default_factory=dict)
    server_cpus: float = 2
    trainer_cpus: float = 4
    server_memory_bytes: int | None = None
    trainer_memory_bytes: int | None = None
    gpus_per_trainer: int | None = None
    gang: Literal["volcano", "kueue"] | None = None
    queue: str | None = None
    token_secret: str | None = None
    tls_secret: str | None = None
    http_secret: str | None = None
    http_tls_secret: str | None = None
    environment_secret: str | None = None
    monitoring_namespace: str | None = None
    operator: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    image_pull_secret: str | None = None
    priority_class: str | None = None
    retries: int = 10
    keep_seconds: int = 86_400

    def __post_init__(self) -> None:
        if self.gang == "kueue" and not self.queue:
            raise OptionsError("gang kueue needs the name of a LocalQueue: give queue (--queue NAME)")
