"""Small checkpoints for tests."""

import torch

from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.job import DiskShare, SaveJob, SavePolicy
from headway.core.checkpoint.state import CollectedState

TENSORS = {
    "model/0/a": torch.arange(12.0).reshape(3, 4), "model/0/b": torch.randn(5).to(torch.bfloat16), "model/0/empty": torch.zeros(0, 3),
    "model/0/scalar": torch.tensor(3), "optimizer/0/a/exp_avg": torch.ones(4, 3).t(), "custom/0/c": torch.tensor([1 + 2j]),
    "model/0/bool": torch.tensor([True, False]), "model/0/f8": torch.ones(3).to(torch.float8_e5m2fnuz),
}  # fmt: skip


def make_job(folder, nonce="0" * 16, **more):
    """Return a save job for `checkpoint_1` in the folder, with `TENSORS`. Keyword arguments replace its parts."""
    share = DiskShare(**{name: more.pop(name) for name in ("part", "num_parts", "is_committer") if name in more})
    content = {"tensors": TENSORS, "aliases": {"model/0/tied": "model/0/a"}, "state": {"clock": [1]}}
    content = CollectedState(**{name: more.pop(name, value) for name, value in content.items()})
    given = {"final": folder / "checkpoint_1", "nonce": nonce, "share": share, "policy": SavePolicy(), "content": content,
             "about": {"num_updates": 7}}  # fmt: skip
    return SaveJob(**{**given, **more})


def save(folder, **more):
    """Save a checkpoint in one process and return its manifest. Keyword arguments are those of `make_job`."""
    made = make_job(folder, **more)
    writer.create_staging(made)
    writer.mark_as_writing(made)
    return writer.write_checkpoint(made)
