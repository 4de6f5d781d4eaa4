"""What the Accelerator's arguments mean together: windows, loading, project folders, and where they were written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headway.common.callsite import call_site
from headway.config.load import UNSET, run_setting
from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.errors import ConfigError


def caller() -> str:
    """`file:line` of the code that builds the Accelerator, for errors about its arguments."""
    return f"Accelerator(...) at {call_site()}"


def windows(
    steps: int | None, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None, origin: str
) -> GradientAccumulationPlugin:
    """How micro-batches form an update, from the three arguments that say so."""
    _check_kind("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is not None and steps is not None:
        raise ConfigError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    if global_batch_size is not None and (steps is not None or plugin is not None):
        raise ConfigError(
            f"global_batch_size={global_batch_size} derives the accumulation; do not give the steps as well"
        )
    if plugin is not None:
        return plugin
    chosen, _ = run_setting(
        "gradient_accumulation_steps", UNSET if steps is None else steps, 1, code_origin=origin, parse=int
    )
    return GradientAccumulationPlugin(num_steps=chosen)


def is_automatic(microbatching: str | None, plugin: GradientAccumulationPlugin) -> bool:
    """Are batches cut into pieces where memory demands it?

    Raises:
        ConfigError: another word than "auto", or gradients are to travel at every micro-batch.
    """
    if microbatching not in (None, "auto"):
        raise ConfigError(f"microbatching={microbatching!r}; allowed: 'auto', or None to leave batches whole")
    if microbatching == "auto" and plugin.sync_each_batch:
        raise ConfigError(
            "microbatching='auto' lets nothing travel before a window's end, which contradicts sync_each_batch=True; "
            "drop one of the two"
        )
    return microbatching == "auto"


def loading_settings(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """How loaders split, pad and move batches, from the two arguments that say so."""
    _check_kind("dataloader_config", config, DataLoaderConfiguration)
    if config is not None and split_batches and not config.split_batches:
        raise ConfigError("split_batches=True contradicts dataloader_config.split_batches=False; set it in one place")
    return config or DataLoaderConfiguration(split_batches=split_batches)


def project_settings(folder: str | Path | None, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """Where the run keeps files, from the two arguments that say so."""
    _check_kind("project_config", config, ProjectConfiguration)
    if config is not None and folder is not None and config.project_dir not in (None, folder):
        raise ConfigError(
            f"project_dir={str(folder)!r} contradicts project_config.project_dir={str(config.project_dir)!r}"
        )
    chosen = config or ProjectConfiguration(project_dir=folder)
    if chosen.project_dir is None and folder is not None:
        chosen = replace(chosen, project_dir=folder)
    return chosen.with_defaults()


def _check_kind(name: str, given: object, kind: type) -> None:
    if given is None or isinstance(given, kind):
        return
    shown = f"{kind.__name__}(...)"
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        shown = f"{kind.__name__}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    raise ConfigError(
        f"{name} is of type {type(given).__module__}.{type(given).__qualname__}; ".replace("builtins.", "")
        + f"give {name}={shown}, with {kind.__name__} from headway"
    )
