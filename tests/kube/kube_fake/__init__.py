"""A Kubernetes API server for tests: real HTTP on loopback, no nodes. What it does as the real one, and what not:

- discovery, server-side apply with field managers and conflicts, dry run, strict field validation, watches, foreground
  deletion with finalizers and owners, RBAC from the Roles in it, object-count quotas, pod logs with follow
- custom resources are validated against the schemas of their CRDs, defaults filled in, as the real one does
- built-in kinds have no schema here: only their names are checked, and their lists are replaced as a whole
- no controllers: `FakeKubeRay` does what KubeRay's operator would, when it is told to
"""

from kube_fake.kuberay import FakeKubeRay
from kube_fake.server import FakeKubernetes
from kube_fake.validation import Refusal

__all__ = ["FakeKubeRay", "FakeKubernetes", "Refusal"]
