"""Loading the weights of the best checkpoint into the Trainer's model."""

import torch

from headway import Accelerator
from headway.trainer.checkpoints import load_weights


class Net(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.last = torch.nn.Linear(3, 1)
        self.register_buffer("scale", torch.full((1, 3), value).expand(4, 3))


def test_buffers_that_expand_made_are_put_back_too(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net(1.0))
    folder = accelerator.save_state(tmp_path / "best")
    other = Net(2.0)
    load_weights(folder, other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
