"""Arguments of torch's own settings: TF32, and the options of DDP, which reach the Accelerator."""

import pytest
import torch

from headway import DistributedDataParallelKwargs, Trainer
from headway.errors import ConfigError
from headway.trainer.builder import create_accelerator, set_tf32
from tests.unit.trainer.models import Net, arguments


def get_ddp_options(folder, **given):
    return create_accelerator(arguments(folder, **given))._run.options.ddp


@pytest.mark.parametrize("name", ["find_unused_parameters", "broadcast_buffers", "static_graph"])
@pytest.mark.parametrize("value", [True, False])
def test_ddp_options_reach_the_strategy(name, value, tmp_path):
    assert getattr(get_ddp_options(tmp_path, **{f"ddp_{name}": value}), name) is value


def test_ddp_buckets_and_other_handlers(tmp_path):
    from headway import GradScalerKwargs

    config = {"kwargs_handlers": [GradScalerKwargs(init_scale=4.0)]}
    assert get_ddp_options(tmp_path, ddp_bucket_cap_mb=7, accelerator_config=config).bucket_cap_mb == 7
    with pytest.raises(ConfigError, match="ddp_bucket_cap_mb=0"):
        arguments(tmp_path, ddp_bucket_cap_mb=0)
    config = {"kwargs_handlers": [DistributedDataParallelKwargs()]}
    with pytest.raises(ConfigError, match="ddp_bucket_cap_mb and DistributedDataParallelKwargs"):
        arguments(tmp_path, ddp_bucket_cap_mb=7, accelerator_config=config)


@pytest.fixture
def flags():
    """torch's flags of TF32, which are restored after the test."""
    found = torch.backends.cuda.matmul, torch.backends.cudnn
    values = [flag.allow_tf32 for flag in found]
    yield found
    for flag, value in zip(found, values, strict=True):
        flag.allow_tf32 = value


def test_tf32_is_set_or_refused(tmp_path, monkeypatch, flags):
    """Whether a GPU supports TF32 is replaced, because there is none: the flags themselves are torch's."""
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="tf32=True needs an NVIDIA GPU"):
            Trainer(Net(), arguments(tmp_path, tf32=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    for value in (True, False):
        set_tf32(value)
        assert [flag.allow_tf32 for flag in flags] == [value, value]
    monkeypatch.undo()
    flags[0].allow_tf32 = flags[1].allow_tf32 = True
    Trainer(Net(), arguments(tmp_path))
    assert [flag.allow_tf32 for flag in flags] == [True, True]
    Trainer(Net(), arguments(tmp_path, tf32=False))
    assert [flag.allow_tf32 for flag in flags] == [False, False]
