"""DeepSpeed ZeRO. The only package that imports deepspeed."""
