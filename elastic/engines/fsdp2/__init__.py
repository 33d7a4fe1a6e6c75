"""Training with torch's FSDP2 (`fully_shard`); deepspeed is not imported."""
