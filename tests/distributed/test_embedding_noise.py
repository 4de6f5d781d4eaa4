"""NEFTune under tensor and context parallelism: all ranks of a group add the same noise, as one process does."""

from pathlib import Path

import pytest
import torch

from headway import Trainer
from headway.trainer.collation import Collator
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import arguments, llama, losses, texts


def train(folder: Path, strategy: str) -> list[float]:
    """Return the loss of each update with noise on the embeddings."""
    torch.set_num_threads(1)
    args = arguments(
        folder, neftune_noise_alpha=5.0, max_steps=4, optim="sgd", accelerator_config={"strategy": strategy}
    )
    trainer = Trainer(llama(), args, Collator(pad_token_id=0), texts(24, low=7, high=8))
    trainer.train()
    return losses(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tp", "cp"])
def test_ranks_of_one_group_add_the_noise_of_one_process(strategy: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(train, 1, tmp_path / "one", "ddp", timeout=120)
    for found in run_ranks(train, 2, tmp_path / strategy, strategy, timeout=120):
        assert found == pytest.approx(expected, rel=1e-4)
