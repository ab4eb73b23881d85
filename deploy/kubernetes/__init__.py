"""A job as Kubernetes objects: what `paddlewheel deploy k8s` prints. deploy/README.md says why so."""

from paddlewheel.deploy.kubernetes.options import KubernetesOptions
from paddlewheel.deploy.kubernetes.render import UnreachablePathError, render, to_yaml, write_folder

__all__ = ["KubernetesOptions", "UnreachablePathError", "render", "to_yaml", "write_folder"]
