"""What ranks would import one by one: loaded once, in the server that is forked for each of them."""

import gc

import pytest  # noqa: F401 - the module of each test imports it
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.data  # noqa: F401
import transformers

import headway.accelerator  # noqa: F401

for name in ("Bert", "GPT2", "Llama", "Mixtral"):  # four seconds of each rank that has such a model
    getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}PreTrainedModel")

gc.collect()
gc.freeze()  # a collection in a rank would copy the pages of all that is here
