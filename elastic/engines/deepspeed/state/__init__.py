"""The sharded state of a DeepSpeed engine, by ZeRO stage."""
