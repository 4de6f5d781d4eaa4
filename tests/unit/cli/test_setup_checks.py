"""Checks of `headway test` leave the random number generators as they were."""

import torch

from headway.cli import setup_checks
from headway.core.config.mesh import Layout


def test_model_of_the_checks_does_not_seed_accelerators(monkeypatch):
    # `torch.manual_seed` seeds the accelerators through this function. A stand-in, because there is no GPU here.
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    first, second = setup_checks._make_model(Layout()), setup_checks._make_model(Layout())
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds == []
    assert torch.equal(first.head.weight, second.head.weight)
