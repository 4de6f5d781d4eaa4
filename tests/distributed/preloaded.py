"""What ranks would import one by one: loaded once, in the server that is forked for each of them."""

import gc

import pytest  # noqa: F401 - the module of each test imports it
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.data  # noqa: F401

import headway.accelerator
import headway.data.loader
import headway.replay.step
import headway.strategies.context.context_parallel
import headway.strategies.fully_sharded.sharded_models
import headway.strategies.pipeline.strategy
import headway.strategies.tensor.tensor_parallel  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a rank would copy the pages of all that is here
