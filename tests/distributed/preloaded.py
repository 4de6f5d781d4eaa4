"""What ranks would import one by one: loaded once, in the server that is forked for each of them."""

import gc

import pytest  # noqa: F401 - the module of each test imports it
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.data
import transformers

import headway.accelerator  # noqa: F401

# Four seconds of each rank that has such a model. They start CUDA where torch has it, which no fork can use then.
if torch.version.cuda is None:
    for name in ("Bert", "GPT2", "Llama", "Mixtral"):
        getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}PreTrainedModel")

gc.collect()
gc.freeze()  # a collection in a rank would copy the pages of all that is here
