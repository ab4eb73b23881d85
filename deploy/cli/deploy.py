"""``paddlewheel deploy``: a job for a cluster, as files. Nothing is sent anywhere."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from paddlewheel.deploy.cli.arguments import JobFile, Overrides

app = App(name="deploy", help="Write what a cluster needs to run a job. Nothing is sent anywhere.")

_SIZE_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_MEMORY_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class DeployError(ValueError):
    """An option of `paddlewheel deploy` cannot be used."""


@app.command
def k8s(
    job: JobFile,
    *,
    image: Annotated[str, Parameter(help="Container image, built by deploy/docker.")],
    out: Annotated[
        Path | None,
        Parameter(help="Folder for one file an object and a kustomization.yaml; else one stream is printed."),
    ] = None,
    namespace: Annotated[str | None, Parameter(help="Written into the objects; else `kubectl -n` decides.")] = None,
    data_claim: Annotated[str | None, Parameter(help="Claim with the data: at /data, read-only.")] = None,
    runs_claim: Annotated[
        str | None, Parameter(help="Existing ReadWriteMany claim for checkpoints and logs, at /runs; else one is made.")
    ] = None,
    storage_class: Annotated[str | None, Parameter(help="Storage class of the claim that is made.")] = None,
    keys: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="Expected keys of a table, such as item=200m; sizes memory. 10m where not said."),
    ] = (),
    server_cpus: Annotated[float, Parameter(help="Processors of each server.")] = 2,
    trainer_cpus: Annotated[float, Parameter(help="Processors of each trainer.")] = 4,
    server_memory: Annotated[
        str | None, Parameter(help="Memory of each server, such as 32Gi, instead of sizing.")
    ] = None,
    trainer_memory: Annotated[str | None, Parameter(help="Memory of each trainer, instead of sizing.")] = None,
    gpus: Annotated[int | None, Parameter(help="GPUs of each trainer (with an image of the gpu extra).")] = None,
    gang: Annotated[
        Literal["volcano", "kueue"] | None, Parameter(help="Who makes sure that all pods start together.")
    ] = None,
    queue: Annotated[str | None, Parameter(help="Queue of Volcano or Kueue.")] = None,
    token_secret: Annotated[str | None, Parameter(help="Secret whose `token` every role must show.")] = None,
    tls_secret: Annotated[
        str | None, Parameter(help="Secret (ca.crt, tls.crt, tls.key): mutual TLS of the control plane.")
    ] = None,
    http_secret: Annotated[
        str | None, Parameter(help="Secret (username, password) of the metrics and the status page.")
    ] = None,
    http_tls_secret: Annotated[str | None, Parameter(help="Secret (tls.crt, tls.key) of the same.")] = None,
    environment_secret: Annotated[
        str | None, Parameter(help="Secret whose keys become variables, such as those of an object store.")
    ] = None,
    monitoring_namespace: Annotated[
        str | None, Parameter(help="The only other namespace that may read the metrics; else any may.")
    ] = None,
    operator: Annotated[
        bool, Parameter(negative=(), help="Also a PodMonitor and a PrometheusRule for the Prometheus operator.")
    ] = False,
    node_selector: Annotated[
        tuple[str, ...], Parameter(negative=(), help="KEY=VALUE that nodes of servers and trainers must have.")
    ] = (),
    image_pull_secret: Annotated[str | None, Parameter(help="Secret to pull the image with.")] = None,
    priority_class: Annotated[str | None, Parameter(help="Priority class of all pods.")] = None,
    retries: Annotated[int, Parameter(help="How often a failed pod is replaced, by rank.")] = 10,
    overrides: Overrides = (),
) -> None:
    """Render a job as Kubernetes objects, from the job file and the sizes of its tables.

    paddlewheel deploy k8s job.yaml --image IMAGE --data-claim clicks --keys default=200m | kubectl apply -f -

    Paths in the job file are those inside the containers: data under /data, checkpoints under /runs.
    """
    from paddlewheel.deploy.kubernetes import KubernetesOptions, render, to_yaml, write_folder
    from paddlewheel.trainer.job.config import JobConfig
    from paddlewheel.trainer.models.config import CustomModelConfig

    options = KubernetesOptions(
        image=image,
        namespace=namespace,
        data_claim=data_claim,
        runs_claim=runs_claim,
        storage_class=storage_class,
        keys={name: _count(text, pair) for pair, (name, text) in _pairs("--keys", keys).items()},
        server_cpus=server_cpus,
        trainer_cpus=trainer_cpus,
        server_memory_bytes=_memory(server_memory),
        trainer_memory_bytes=_memory(trainer_memory),
        gpus_per_trainer=gpus,
        gang=gang,
        queue=queue,
        token_secret=token_secret,
        tls_secret=tls_secret,
        http_secret=http_secret,
        http_tls_secret=http_tls_secret,
        environment_secret=environment_secret,
        monitoring_namespace=monitoring_namespace,
        operator=operator,
        node_selector=dict(_pairs("--node-selector", node_selector).values()),
        image_pull_secret=image_pull_secret,
        priority_class=priority_class,
        retries=retries,
    )
    config = JobConfig.load(job, overrides)
    if isinstance(config.model, CustomModelConfig) and config.model.folder == str(job.parent.absolute()):
        # beside the job file there, too
        config = config.model_copy(update={"model": config.model.model_copy(update={"folder": None})})
    objects = render(config, options)
    if out is None:
        print(to_yaml(objects), end="")
        return
    for path in write_folder(objects, out):
        print(path)


def _pairs(option: str, given: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise DeployError(f"{option} {pair}: write NAME=VALUE")
        found[pair] = (name, value)
    return found


def _count(text: str, pair: str) -> int:
    unit = _SIZE_UNITS.get(text[-1:].lower(), 1)
    number = text[:-1] if unit > 1 else text
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if value < 1:
        raise DeployError(f"--keys {pair}: a number such as 5000000, 200m or 1.5g is needed")
    return int(value)


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    unit = _MEMORY_UNITS.get(text[-2:], 0)
    try:
        value = float(text[:-2]) * unit
    except ValueError:
        value = 0.0
    if value < 1:
        raise DeployError(f"memory of {text!r}: a number with Mi or Gi is needed, such as 32Gi")
    return int(value)
