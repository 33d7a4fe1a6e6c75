"""One run from its start to its end: launched, followed, handed over, on a local cluster or an existing one."""
