"""Experts that neighbouring ranks share (`mesh: {ep: N}`): DeepSpeed's AutoEP, release 0.19.8."""
