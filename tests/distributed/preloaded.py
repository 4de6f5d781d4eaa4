"""Modules that the fork server imports once, so that the ranks forked from it need not import them."""

import gc

import pytest  # noqa: F401 - every test module imports it
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.data
import transformers

import headway.accelerator  # noqa: F401

# Importing these classes would take four seconds in each rank that uses them. With a CUDA build of torch, the imports
# initialize CUDA, which a forked process cannot use.
if torch.version.cuda is None:
    for name in ("Bert", "GPT2", "Llama", "Mixtral"):
        getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}PreTrainedModel")

gc.collect()
gc.freeze()  # a garbage collection in a rank would otherwise copy all of the preloaded modules' pages
