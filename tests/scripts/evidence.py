"""What a run of a script leaves behind to be compared: lists of numbers by name, one JSON file a process."""

import json
import os
import signal
from collections import defaultdict
from pathlib import Path

import torch


class Evidence:
    """Numbers in the order in which they came, as exact as they are.

    Args:
        folder: where `rank<n>.json` goes; None: nothing is written.
        rank: of this process.
    """

    def __init__(self, folder, rank):
        self.path = None if folder is None else Path(folder, f"rank{rank}.json")
        self.numbers = defaultdict(list)
        # "loss:7": this process dies as by a power cut when its seventh loss is noted.
        self.deadly, _, self.count = os.environ.get("EVIDENCE_KILL", "").partition(":")

    def add(self, name, *values):
        """Note numbers or tensors of any shape under a name."""
        for value in values:
            flat = torch.as_tensor(value).detach().double().flatten()
            self.numbers[name] += flat.tolist()
        if name == self.deadly and len(self.numbers[name]) >= int(self.count):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, *models, name="gradients"):
        """Note each gradient's sum and its norm, in float64."""
        for model in models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.detach().double()
                    self.add(name, gradient.sum(), gradient.norm())

    def parameters(self, *models, name="parameters"):
        """Note each parameter's and buffer's sum and norm, in float64."""
        for model in models:
            for value in model.state_dict().values():
                self.add(name, value.double().sum(), value.double().norm())

    def write(self):
        """Write what was noted; floats keep every bit."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.numbers))
