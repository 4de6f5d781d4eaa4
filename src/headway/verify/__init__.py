"""`headway verify`: runs a training script several times for a few updates, and compares what the runs computed.

The command decides which runs of the script are needed (`session.py`). Each run has its own processes (`runs.py`),
whose environment contains a `RunRequest`. The Accelerator of such a process attaches a `RunRecorder`, which writes
records of each update into a scratch folder. The checks in `proofs/`, called proofs, compare these records without
importing torch.
"""
