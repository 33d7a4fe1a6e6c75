"""Weights in and out: checkpoints as files of other libraries, and files of other libraries as the start of a run.

| module | what it is |
|---|---|
| `tensors.py` | the tensors of a checkpoint by name, one at a time |
| `output_folder.py` | a folder that appears whole or not at all |
| `export.py` | `elastic.export`: which formats exist, and what they are given |
| `safetensors_files.py`, `torch_file.py`, `distributed.py`, `universal.py` | one module for each format |
"""
