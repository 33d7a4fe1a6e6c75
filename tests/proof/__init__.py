"""Real bugs of resharders as mutations of ours: each must be refused before the first step. `python -m proof`."""
