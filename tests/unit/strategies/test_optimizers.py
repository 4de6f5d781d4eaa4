import pytest
import torch

from headway.errors import UnsupportedError
from headway.strategies.optimizers import check_optimizer


def test_what_works_on_parts_passes():
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon, torch.optim.LBFGS):
        check_optimizer(kind(weight, lr=0.1))


def test_what_does_not_is_refused_by_name_subclasses_too():
    class Mine(torch.optim.Adafactor):
        pass

    for kind in (torch.optim.Adafactor, Mine):
        with pytest.raises(
            UnsupportedError, match=f"{kind.__name__} cannot train a sharded model: it needs whole matrices"
        ):
            check_optimizer(kind([torch.nn.Parameter(torch.ones(2, 2))]))
    foreign = type("Adam8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adam"})
    with pytest.raises(UnsupportedError, match="bitsandbytes does not support DTensor; use torchao's AdamW8bit"):
        check_optimizer(foreign([torch.nn.Parameter(torch.ones(2))], lr=0.1))
