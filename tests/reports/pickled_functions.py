"""A script that pickles functions which use the module `accelerate`: with cloudpickle, with dill and for notebook processes."""

import copy
import pickle
from pathlib import Path

import accelerate
import accelerate.utils
import cloudpickle
import dill
import torch
from accelerate import notebook_launcher, utils
from datasets.fingerprint import Hasher


class Holder:
    """An object that holds the module `accelerate`."""

    def __init__(self):
        self.library = accelerate


def write_sum(value):
    accelerator = accelerate.Accelerator(cpu=True)
    total = accelerator.reduce(accelerate.utils.send_to_device(accelerator.process_index + torch.tensor(value), "cpu"))
    Path(f"rank{accelerator.process_index}").write_text(str(total.item()))


if __name__ == "__main__":
    for module in (accelerate, accelerate.utils, utils, accelerate.utils.operations):
        for copy_of_module in (
            cloudpickle.loads(cloudpickle.dumps(module)), dill.loads(dill.dumps(module)), pickle.loads(pickle.dumps(module)),
            copy.copy(module), copy.deepcopy(module),
        ):  # fmt: skip
            assert copy_of_module is module
    assert copy.deepcopy(Holder()).library is accelerate
    assert cloudpickle.loads(cloudpickle.dumps(write_sum)).__globals__["accelerate"] is accelerate
    assert dill.loads(dill.dumps(write_sum, recurse=True)).__globals__["accelerate"] is accelerate
    Path("fingerprint").write_text(Hasher.hash(write_sum))
    notebook_launcher(write_sum, (10,), num_processes=2)
