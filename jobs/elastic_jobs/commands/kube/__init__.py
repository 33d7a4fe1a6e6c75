"""elastic kube: runs on Kubernetes with KubeRay, one module per subcommand."""
