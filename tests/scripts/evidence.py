"""Records numbers of a script's run, for comparisons with another run: lists of numbers by name, in one JSON file per process."""

import json
import os
import signal
from collections import defaultdict
from pathlib import Path

import torch


class Evidence:
    """Recorder of numbers, which keeps their order and full precision.

    Args:
        folder: Folder for `rank<n>.json`. None writes nothing.
        rank: Rank of this process.
    """

    def __init__(self, folder, rank):
        self.path = None if folder is None else Path(folder, f"rank{rank}.json")
        self.numbers = defaultdict(list)
        # "loss:7" kills this process when it records its seventh loss, like a power failure.
        self.deadly, _, self.count = os.environ.get("EVIDENCE_KILL", "").partition(":")

    def add(self, name, *values):
        """Append numbers or tensors of any shape to the list `name`."""
        for value in values:
            flat = torch.as_tensor(value).detach().double().flatten()
            self.numbers[name] += flat.tolist()
        if name == self.deadly and len(self.numbers[name]) >= int(self.count):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, *models, name="gradients"):
        """Record the sum and the norm of each gradient, in float64."""
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.detach().double()
                    self.add(name, gradient.sum(), gradient.norm())

    def parameters(self, *models, name="parameters"):
        """Record the sum and the norm of each parameter and buffer, in float64."""
        for model in models:
            for value in model.state_dict().values():
                self.add(name, value.double().sum(), value.double().norm())

    def write(self):
        """Write the recorded numbers with full precision."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.numbers))
