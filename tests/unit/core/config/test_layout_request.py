"""Context parallelism in a run's settings: Accelerate's sizes and words, the launcher's, and the resulting layout."""

import pytest

from headway import ParallelismConfig, TorchContextParallelConfig
from headway.compat.accelerate.launching.layout_words import read_size
from headway.compat.accelerate.plugins import get_parallelism_config
from headway.core.config.engines import EngineOptions, collect_options
from headway.core.config.layout_choice import RequestedLayout
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import LayoutRequest
from headway.errors import ConfigError


def decided(
    parallelism: ParallelismConfig | None = None, handlers: list[object] | None = None, strategy: str | None = None
):  # type: ignore[no-untyped-def]
    options = collect_options(handlers) if handlers else EngineOptions()
    return RequestedLayout(strategy, "the script", parallelism_config=parallelism).resolve(options, 8, 8)


def test_sizes_of_accelerate_make_the_layout() -> None:
    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall", labels="y", blocks=["Layer"])
    chosen = decided(ParallelismConfig(dp_shard_size=4, cp_size=2, cp_handler=handler))
    assert chosen.layout == Layout(shard=4, cp=2)
    assert (chosen.layout.num_data_shards, chosen.layout.num_shards) == (4, 8)
    assert chosen.options.context == TorchContextParallelConfig("alltoall", ("y",), ("Layer",))
    sizes = get_parallelism_config(chosen)
    assert sizes is not None
    assert sizes.sizes["cp"] == 2
    assert decided(strategy="cp").layout == Layout(cp=8)
    assert decided(strategy="fsdp+cp=2").options.context == TorchContextParallelConfig()


def test_options_may_come_as_a_handler_but_not_twice() -> None:
    handler = TorchContextParallelConfig("alltoall")
    assert decided(handlers=[handler], strategy="cp").options.context == handler
    with pytest.raises(ConfigError, match="contain two TorchContextParallelConfig; keep one"):
        decided(ParallelismConfig(cp_size=8, cp_handler=TorchContextParallelConfig()), [handler])


def test_keys_of_accelerates_files() -> None:
    found = LayoutRequest()
    for name, value in {
        "cp_size": 2,
        "dp_shard_size": 2,
        "cp_comm_strategy": "alltoall",
        "cp_backend": "torch",
    }.items():
        read_size(found, name, value)
    assert found.settings["cp_comm_strategy"] == ("alltoall", "parallelism_config_cp_comm_strategy")
    assert found.find_strategy()[0] == "fsdp=2+cp=2"  # type: ignore[index]
    assert any(text == "not needed: there is no other backend than torch" for _, text in found.lines)
    with pytest.raises(ConfigError, match="cp_backend='ring'; allowed: TORCH"):
        read_size(found, "cp_backend", "ring")


def test_ranks_along_cp_read_the_same() -> None:
    layout = Layout(shard=2, cp=2)
    assert layout.data_groups == [[0, 2], [1, 3]]
    assert layout.describe() == "2 shards x 2 parts of a sequence"
