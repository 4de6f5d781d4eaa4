"""Registry of extensions: maps public words, such as "tp" or "s3", to the modules that implement them.

The core never imports an extension directly. When an argument, a setting or a method call requests an extension by its
word, the core looks up the word in this registry and imports the module. `scripts/core.py` and import-linter check that
the core imports extensions in no other way.
"""

from functools import cache
from importlib import import_module
from typing import Any

from headway.errors import ConfigError

_LOCATIONS: dict[str, dict[str, str]] = {
    # Axes of the mesh that split models: `headway.core.strategies.fully_sharded.axes`.
    "axis": {
        "cp": "headway.layouts.context.context_parallel:ContextAxis",
        "ep": "headway.layouts.tensor.experts:ExpertAxis",
        "tp": "headway.layouts.tensor.tensor_parallel:TensorAxis",
    },
    # Functions that choose the plugin of an engine other than DDP and FSDP: `headway.core.config.engine_plugin`.
    "engine": {"deepspeed": "headway.layouts.deepspeed.plugin:choose_plugin"},
    # Modules that resolve the names of another library. Scripts written for that library read such names from an
    # Accelerator ("members", used by `headway.accelerator`) or import them ("names", used by `headway.__getattr__`).
    "members": {"accelerate": "headway.compat.accelerate.members"},
    "names": {"accelerate": "headway.compat.accelerate.provided_names.as_headway"},
    # Classes of strategies: `headway.core.strategies.build`.
    "strategy": {"pp": "headway.layouts.pipeline.strategy:PipelineStrategy"},
    # Classes of checkpoint stores, by URL scheme: `headway.core.checkpoint.folders.find_store`.
    "store": {
        "az": "headway.integrations.object_store.store:ObjectStore",
        "gs": "headway.integrations.object_store.store:ObjectStore",
        "s3": "headway.integrations.object_store.store:ObjectStore",
    },
    # Features that only some runs use, by the Accelerator's argument or method that requests them.
    "feature": {
        "adapted_models": "headway.layouts.adapters:prepare_for_sharding",
        "average": "headway.extras.moving_average:get_swap_function",
        "best_checkpoint": "headway.extras.best_checkpoint",
        "changed_groups": "headway.extras.changed_groups",
        "checkpoint_activations": "headway.extras.activation_checkpointing:checkpoint_activations",
        "compile": "headway.extras.compiling:compile_model",
        "explain_group_misfit": "headway.extras.group_misfits:explain_misfit",
        "explain": "headway.extras.origin:WindowReplay",
        "float8": "headway.extras.float8",
        "forecast": "headway.forecasting.in_script:forecast_step",
        "gather_written_tensors": "headway.extras.adapter_tensors:gather_written_tensors",
        "hang_watch": "headway.launch.watch.peer_watch:start",
        "keep_activations": "headway.extras.activation_checkpointing:keep_activations",
        "keep_compiled": "headway.extras.compiled_artifacts",
        "keep_in_memory": "headway.extras.memory_copies:MemoryTier",
        "low_bit_states": "headway.layouts.low_bit.states",
        "memory_report": "headway.extras.memory_report",
        "mirror_log": "headway.integrations.object_store.log_mirror",
        "microbatching": "headway.extras.replay.step:PieceStep",
        "packing": "headway.language_data.boundary_check:check_prepared_models",
        "on_spike": "headway.extras.spikes:SpikeGuard",
        "overlap_saves": "headway.extras.early_pinning:EarlyPinning",
        "profile": "headway.extras.profiling:profile_block",
        "hash_stream_sources": "headway.language_data.stream_sources:hash_sources",
        "interleave_shards": "headway.language_data.interleaved_shards",
        "repeat_checkpointing": "headway.extras.activation_checkpointing:repeat_checkpointing",
        "sharded_adapters": "headway.extras.sharded_adapters:adapt_methods",
        "sharded_submodules": "headway.extras.sharded_submodules:adapt_submodules",
        "stall_limit": "headway.extras.stall_watch:allow_stalls",
        "stream_weights": "headway.extras.weight_stream:WeightStream",
        "throughput": "headway.extras.throughput:Throughput",
        "untrained_parameters": "headway.extras.untrained_parameters:watch_second_update",
        "verify": "headway.verify.recorder",
        "verify_function": "headway.verify.in_notebook:verify_function",
        "whole_updates": "headway.layouts.whole_updates.updates:WholeUpdates",
    },
}
"""Locations of all extensions: {kind of extension: {public word: "module" or "module:name"}}."""


def list_words(kind: str) -> tuple[str, ...]:
    """Return the public words of one kind of extension.

    Args:
        kind: Kind of extension: a key of the registry, such as "feature".
    """
    return tuple(_LOCATIONS[kind])


@cache
def load(kind: str, word: str) -> Any:
    """Import an extension on first use, and return it: a module, or a class or function in a module.

    Args:
        kind: Kind of extension: a key of the registry, such as "feature".
        word: Public word, such as "compile".

    Raises:
        ConfigError: If no extension of this kind has this word.
        ImportError: If the extension needs a package that is not installed.
    """
    location = _LOCATIONS.get(kind, {}).get(word)
    if location is None:
        raise ConfigError(
            f"no {kind} is called {word!r}; choose one of {', '.join(map(repr, _LOCATIONS.get(kind, ())))}"
        )
    module, _, name = location.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)
