"""The micro-lab: how gradients travel in ZeRO stages 0 and 3, predicted and measured. `make lab`; docs/lab.md."""
