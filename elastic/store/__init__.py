"""Objects (named byte strings) in any fsspec storage: checkpoints, journals and run folders are kept in them.

| module | what it is |
|---|---|
| `objects.py`, `open.py` | the protocol; choosing its implementation for an address |
| `local.py` | files below a folder |
| `remote.py`, `s3.py` | any fsspec driver, with retries; S3 |
| `address.py`, `errors.py` | from an address to a driver; foreign errors translated |
"""
