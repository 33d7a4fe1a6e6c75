"""Layers that neighbouring ranks share out (`mesh: {pp: N}`): `deepspeed.pipe.PipelineModule`, release 0.19.8."""
