"""Test `kwargs_handlers`: at most one of each class, and only known classes."""

import pytest

from headway.core.config.engines import EngineOptions, collect_options
from headway.core.config.torch_kwargs import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProfileKwargs,
)
from headway.errors import ConfigError


def test_handlers_are_sorted_by_class():
    class Own(DistributedDataParallelKwargs):
        pass

    ddp, scaler = Own(bucket_cap_mb=3), GradScalerKwargs(init_scale=2.0)
    options = collect_options([scaler, ddp])
    assert (options.ddp, options.scaler) == (ddp, scaler)
    assert (options.autocast, options.profile) == (AutocastKwargs(), ProfileKwargs())
    assert collect_options(None) == EngineOptions()


def test_unknown_and_duplicate_handlers_are_refused():
    with pytest.raises(ConfigError, match="contains a dict; allowed: DistributedDataParallelKwargs, "):
        collect_options([{"static_graph": True}])
    with pytest.raises(ConfigError, match="two AutocastKwargs"):
        collect_options([AutocastKwargs(), AutocastKwargs(enabled=False)])


def test_hooks_can_be_given_by_name():
    assert DistributedDataParallelKwargs(comm_hook="fp16").comm_hook is DDPCommunicationHookType.FP16
    with pytest.raises(ConfigError, match="comm_hook='zip'; allowed: no, fp16"):
        DistributedDataParallelKwargs(comm_hook="zip")
    with pytest.raises(ConfigError, match="comm_wrapper='power_sgd'; allowed: no, fp16, bf16"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")
