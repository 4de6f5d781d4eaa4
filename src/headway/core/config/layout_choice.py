"""Choose a run's layout and its options from the script, the script's plugins, and the launcher.

The script takes precedence over the config file and the environment variables. If the script contradicts the command
line, an error is raised.
This module does not import torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core import extensions
from headway.core.config import mesh
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.engine_plugin import EnginePlugin
from headway.core.config.engines import EngineOptions
from headway.core.config.launch import DEEPSPEED_SETTINGS, SHARDING_SETTINGS, UNSET, WRAP_POLICIES
from headway.core.config.layout_after_loss import find_launched_ranks, resolve_on_ranks, warn_of_change
from headway.core.config.layout_request import LayoutPlugin, LayoutRequest, RequestedValue
from headway.core.config.load import (
    COMMAND_LINE,
    read_ranks_per_machine,
    resolve_run_setting,
)
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import ShardingOptions, TorchContextParallelConfig
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)
WHOLE_MODEL_SIZE = 2**62
"""Minimum size of an FSDP unit, in parameters, that is larger than any module. The model is then a single unit."""
_DEFAULT_UNIT_SIZE = 100_000_000
"""Accelerate's default for the minimum number of parameters in an FSDP unit."""
MEGATRON = (
    "Megatron-LM is not supported yet. Leave the plugin out, and use strategy='tp' or 'fsdp+tp=2', which split matrices "
    "(docs/tensor_parallel.md)"
)
_PLUGINS = {
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "parallelism_config": "ParallelismConfig",
    "torch_tp_plugin": "TorchTensorParallelPlugin",
}


@dataclass(frozen=True)
class ResolvedLayout:
    """Layout of a run on its ranks, with the options that apply to it.

    Attributes:
        text: Layout as written by the user.
        layout: Layout on this run's ranks.
        options: Options for DDP, autocast, GradScaler and similar components.
        plugins: Plugins that the script gave, by argument of the Accelerator. A compatibility layer may add others.
        engine: Settings of a training engine that replaces torch's own, such as DeepSpeed, or None.
    """

    text: str
    layout: Layout
    options: EngineOptions
    plugins: dict[str, Any] = field(default_factory=dict)
    engine: EnginePlugin | None = None

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs this layout."""
        return self.text in mesh.ENGINES

    @property
    def default_precision(self) -> str:
        """Mixed precision that the training engine's configuration enables, or "no".

        Settings of the script and the launcher override it.
        """
        return "no" if self.engine is None else self.engine.precision or "no"

    @property
    def default_num_steps(self) -> int | None:
        """Number of micro-batches per update in the training engine's configuration, or None if it sets none.

        A number that the script sets takes precedence.
        """
        return None if self.engine is None else self.engine.num_steps


class RequestedLayout:
    """Layout that the script requests with its arguments and plugins.

    Args:
        strategy: Argument `strategy` of the Accelerator.
        origin: Description of the script's line, for error messages.
        fsdp_plugin, parallelism_config, torch_tp_plugin, megatron_lm_plugin: Arguments of the Accelerator.
        deepspeed_plugin: `deepspeed_plugin` or `deepspeed_plugins` of the Accelerator.

    Attributes:
        request: Layout settings that the plugins request.

    Raises:
        ConfigError: If an argument has the wrong type, or two contradict each other.
        UnsupportedError: If a plugin or one of its fields is not supported.
    """

    def __init__(
        self,
        strategy: str | None,
        origin: str,
        fsdp_plugin: LayoutPlugin | None = None,
        parallelism_config: LayoutPlugin | None = None,
        torch_tp_plugin: LayoutPlugin | None = None,
        megatron_lm_plugin: object = None,
        deepspeed_plugin: object = None,
    ) -> None:
        if megatron_lm_plugin is not None:
            raise UnsupportedError(MEGATRON)
        if not isinstance(strategy, str | None):
            raise _make_type_error("strategy", strategy, "'fsdp'")
        self.origin = origin
        self._deepspeed_plugin = deepspeed_plugin
        self.request = LayoutRequest()
        arguments = {
            "fsdp_plugin": fsdp_plugin,
            "parallelism_config": parallelism_config,
            "torch_tp_plugin": torch_tp_plugin,
        }
        self._plugins = {name: plugin for name, plugin in arguments.items() if plugin is not None}
        for name, plugin in self._plugins.items():
            if getattr(plugin, "argument", None) != name:
                raise _make_type_error(name, plugin, f"headway.{_PLUGINS[name]}(...)")
        self._strategy = None if strategy is None else self._normalize_strategy(strategy)
        for plugin in self._plugins.values():
            plugin.request_layout(self.request)
        if deepspeed_plugin is not None:
            self.request.use_deepspeed("deepspeed_plugin")
        for key, reason in self.request.refused.items():
            raise UnsupportedError(f"{key}: {reason}")
        self._plugin_strategy = self.request.find_strategy()

    def _normalize_strategy(self, strategy: str) -> str:
        """Return the normalized name of a strategy. Raise `ConfigError` with the origin of the name if it is unknown."""
        try:
            return mesh.normalize_strategy(strategy)
        except ConfigError as error:
            raise ConfigError(f"{error} ({self.origin})") from None

    def resolve(self, given: EngineOptions, num_ranks: int, ranks_on_machine: int) -> ResolvedLayout:
        """Return a `ResolvedLayout`: the layout on this run's ranks, with the options that apply to it.

        Args:
            given: Options from the script's `kwargs_handlers`.
            num_ranks: Number of ranks over all machines.
            ranks_on_machine: Number of ranks on this machine.

        Raises:
            ConfigError: If the layout does not fit the ranks, settings contradict each other, or options or the
                engine's plugin do not fit the layout.
        """
        text, layout = self.choose_layout(num_ranks, ranks_on_machine)
        if find_launched_ranks(num_ranks) is None:
            _check_command_line_options(text, layout)
        elif mesh.find_entry_point(text) is None:
            warn_of_change(text, layout, num_ranks, read_ranks_per_machine() or ranks_on_machine)
        if self.request.ignored:
            log.warning_once("%s: these have no effect here: %s", self.origin, "; ".join(self.request.ignored))
        return ResolvedLayout(
            text,
            layout,
            options=self.choose_options(given, layout),
            plugins=dict(self._plugins),
            engine=self._choose_engine(text),
        )

    def _choose_engine(self, text: str) -> EnginePlugin | None:
        """Return the settings of the training engine that a plugin or the strategy requests, or None if none does.

        An engine is imported only if it is requested.
        """
        if self._deepspeed_plugin is None and text not in mesh.ENGINES:
            return None
        plugin: EnginePlugin | None = extensions.load("engine", "deepspeed")(text, self._deepspeed_plugin, self.origin)
        return plugin

    # ---------------------------------------------------------------- the layout

    def choose_layout(self, num_ranks: int, ranks_on_machine: int) -> tuple[str, Layout]:
        """Return a pair of (layout as written by the user, layout on this run's ranks).

        Args:
            num_ranks: Number of ranks over all machines.
            ranks_on_machine: Number of ranks on this machine.

        Raises:
            ConfigError: If the layout does not fit the ranks, or the script contradicts the command line.
        """

        def resolve_text(text: str) -> Layout:
            if mesh.find_entry_point(text) is not None:
                return Layout(replicate=num_ranks)  # the axes of a strategy from another package are unknown here
            return resolve_on_ranks(mesh.parse_layout(text), num_ranks, read_ranks_per_machine() or ranks_on_machine)

        strategy = self._find_script_strategy(resolve_text)
        launched, _ = resolve_run_setting("strategy", UNSET, None)
        if strategy is not None and launched is not None:
            strategy = self._match_launched(strategy, launched, resolve_text)
        origin = self.origin
        if self._strategy is None and self._plugin_strategy is not None:
            origin = f"{self._plugin_strategy.key} of {self.origin}"
        text, text_origin = resolve_run_setting(
            "strategy", UNSET if strategy is None else strategy, "ddp", code_origin=origin
        )
        try:
            return text, resolve_text(text)
        except ConfigError as error:
            raise ConfigError(f"{error} ({text_origin})") from None

    def _find_script_strategy(self, resolve: Callable[[str], Layout]) -> str | None:
        """Return the strategy that the script requests with `strategy` or plugins, or None if it requests none.

        Raises:
            ConfigError: If `strategy` contradicts a plugin.
        """
        if self._plugin_strategy is None:
            return self._strategy
        plugin_strategy: str = self._plugin_strategy.value
        if self._strategy is None:
            return plugin_strategy
        is_registered = mesh.find_entry_point(self._strategy) is not None
        requested = mesh.parse_layout("ddp" if is_registered else self._strategy)
        if plugin_strategy == "deepspeed":
            fits = self._strategy in mesh.ENGINES
        elif self.request.has_sizes:
            fits = resolve(self._strategy) == resolve(plugin_strategy)
        elif plugin_strategy == "ddp":
            fits = not requested.sizes.keys() - {"replicate"}
        else:
            fits = set(mesh.parse_layout(plugin_strategy).sizes) <= set(requested.sizes)
        if not fits:
            raise ConfigError(
                f"strategy={self._strategy!r} contradicts {plugin_strategy!r} from {self._plugin_strategy.key} in {self.origin}; "
                "keep one of them"
            )
        return self._strategy

    def _match_launched(self, script_strategy: str, launched: str, resolve: Callable[[str], Layout]) -> str:
        """Return the launcher's strategy if it agrees with the script's strategy, else the script's strategy.

        They agree if they give the same layout on this run's ranks. They also agree if the script requests only a
        sharded layout without sizes, or DeepSpeed without a stage, and the launcher requests it in more detail.

        Args:
            script_strategy: Strategy that the script requests.
            launched: Strategy that the launcher requests.
            resolve: Function that returns the layout of a strategy on this run's ranks.
        """
        if script_strategy == launched:
            return script_strategy
        is_only_sharded = self._strategy is None and not self.request.has_sizes and script_strategy == "fsdp"
        if is_only_sharded and mesh.find_entry_point(launched) is None and "shard" in mesh.parse_layout(launched).sizes:
            return launched
        if script_strategy == "deepspeed" and launched in mesh.ENGINES:
            return launched
        if (script_strategy in mesh.ENGINES) != (launched in mesh.ENGINES):  # equal layouts, but different engines
            return script_strategy
        try:
            is_equal = resolve(launched) == resolve(script_strategy)
        except ConfigError:
            return script_strategy
        return launched if is_equal else script_strategy

    # ---------------------------------------------------------------- options

    def choose_options(self, given: EngineOptions, layout: Layout) -> EngineOptions:
        """Return the script's options, completed with options that plugins and the launcher set.

        These are options for sharding, activation checkpointing and context parallelism.

        Args:
            given: Options from the script's `kwargs_handlers`.
            layout: Layout of this run.

        Raises:
            ConfigError: If two sources contradict each other, or an option on the command line does not apply to the
                layout.
        """
        if given.sharding is not None and (self.request.settings or self.request.dtypes):
            keys = ", ".join(requested.key for requested in self.request.settings.values())
            keys = keys or "fsdp_plugin.mixed_precision_policy"
            raise ConfigError(
                f"ShardingOptions in kwargs_handlers contradicts {keys} in {self.origin}; keep one of them"
            )
        sharding = self._build_sharding(given.sharding or ShardingOptions(), layout)
        checkpointing = self._build_checkpointing(given.checkpointing, sharding)
        return replace(
            given, sharding=sharding, checkpointing=checkpointing, context=self._build_context(given.context)
        )

    def _build_context(self, given: TorchContextParallelConfig | None) -> TorchContextParallelConfig:
        """Return the options of context parallelism, from `kwargs_handlers`, the ParallelismConfig and the launcher.

        Args:
            given: Options in `kwargs_handlers`, or None.

        Raises:
            ConfigError: If two sources contradict each other.
        """
        handler = self.request.context
        if given is not None and handler is not None and given != handler:
            raise ConfigError(
                f"kwargs_handlers and parallelism_config.cp_handler of {self.origin} contain two TorchContextParallelConfig; keep "
                "one"
            )
        options = given or handler or TorchContextParallelConfig()
        is_given = given is not None or handler is not None
        exchange, _ = resolve_run_setting(
            "cp_comm_strategy",
            options.cp_comm_strategy if is_given else UNSET,
            None,
            code_origin=f"TorchContextParallelConfig of {self.origin}",
        )
        return replace(options, cp_comm_strategy=exchange)

    def _resolve_setting(self, name: str, code_value: Any = UNSET) -> Any:
        """Return the value of a setting from a plugin, `kwargs_handlers` or the launcher, or None if none sets it.

        Args:
            name: Name of the setting.
            code_value: Value from `kwargs_handlers`; UNSET if there is none. A plugin's value takes precedence.

        Raises:
            ConfigError: If the script contradicts the command line.
        """
        requested = self.request.settings.get(name, RequestedValue(code_value, name))
        resolved, _ = resolve_run_setting(name, requested.value, None, code_origin=f"{requested.key} of {self.origin}")
        return resolved

    def _build_sharding(self, given: ShardingOptions, layout: Layout) -> ShardingOptions:
        """Return the sharding options: the script's, completed with the settings of the command line and the config file.

        Args:
            given: Options from the script's `kwargs_handlers`.
            layout: Layout of the run.

        Raises:
            ConfigError: If two sources contradict each other, or the options do not fit the number of shards.
        """
        reshard = self._resolve_setting(
            "fsdp_reshard_after_forward", _get_unless_default(given, "reshard_after_forward")
        )
        offload = self._resolve_setting("fsdp_offload_params", _get_unless_default(given, "cpu_offload"))
        if reshard is True and given.reshard_after_forward is None:
            # Accelerate's True corresponds to None: all blocks except the root, whose parameters backward needs at once.
            reshard = None
        units, min_num_params = self._choose_units(given)
        options = replace(
            given,
            reshard_after_forward=reshard,
            cpu_offload=bool(offload),
            units=units,
            min_num_params=min_num_params,
            **self.request.dtypes,
        )
        if layout.num_shards > 1:
            options.check(layout.num_shards)
        return options

    def _choose_units(self, given: ShardingOptions) -> tuple[tuple[Any, ...], int]:
        """Return the FSDP units as a pair of (classes or names of units, minimum number of parameters of a unit).

        If the pair is ((), 0), the units are the repeated blocks of the model.

        Args:
            given: Options from the script's `kwargs_handlers`.

        Raises:
            ConfigError: If two sources contradict each other.
        """
        has_own_units = bool(given.units or given.min_num_params)
        policy = self._resolve_setting("fsdp_auto_wrap_policy")
        names = self._resolve_setting(
            "fsdp_transformer_layer_cls_to_wrap", ",".join(map(_get_name, given.units)) or UNSET
        )
        min_num_params = self._resolve_setting("fsdp_min_num_params", given.min_num_params or UNSET)
        if has_own_units:
            return given.units, given.min_num_params
        classes = tuple(name.strip() for name in (names or "").split(",") if name.strip())
        by_class, by_size, whole_model = WRAP_POLICIES
        if classes and policy in (None, by_class):
            return classes, 0
        if classes:
            raise ConfigError(
                f"fsdp_auto_wrap_policy={policy} does not use classes, but some are named: {', '.join(classes)}; drop one"
            )
        if policy == by_size or (policy is None and min_num_params):
            return (), min_num_params or _DEFAULT_UNIT_SIZE
        return (), WHOLE_MODEL_SIZE if policy == whole_model else 0

    def _build_checkpointing(
        self, given: ActivationCheckpointing | None, sharding: ShardingOptions
    ) -> ActivationCheckpointing | None:
        """Return the options of activation checkpointing, or None if it is off.

        Args:
            given: Options from the script's `kwargs_handlers`, or None.
            sharding: Sharding options. The units that they name become the checkpointed blocks, unless the script gave options.

        Raises:
            ConfigError: If two sources contradict each other, or offloading is requested without checkpointing.
        """
        is_requested = self._resolve_setting("activation_checkpointing", UNSET if given is None else True)
        offload = self._resolve_setting("activation_checkpointing_offload", UNSET if given is None else given.offload)
        if not is_requested:
            if offload:
                raise ConfigError(
                    "activation_checkpointing_offload needs activation checkpointing; add "
                    "--activation_checkpointing, or remove it"
                )
            return None
        if given is not None:
            return given
        names = tuple(unit for unit in sharding.units if isinstance(unit, str))
        return ActivationCheckpointing(offload=bool(offload), blocks=names)


def _check_command_line_options(text: str, layout: Layout) -> None:
    """Raise `ConfigError` if an option that was given on the command line does not apply to the run's layout.

    Args:
        text: Layout as written by the user.
        layout: Layout of this run.

    Raises:
        ConfigError: If there is such an option.
    """
    for name, required_layout, _ in list_inapplicable_options(text, layout):
        value, origin = resolve_run_setting(name, UNSET, None)
        if value is not None and origin.startswith(COMMAND_LINE):
            raise ConfigError(
                f"{name} ({origin}) needs {required_layout}, but the layout is {text}: {layout.describe()}; remove it"
            )


def list_inapplicable_options(text: str, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yield a tuple for each setting that does not apply to the layout. On a single rank, all settings are accepted.

    Args:
        text: Layout as written by the user.
        layout: Layout of this run.

    Yields:
        Tuple of (name of the setting, kind of layout that it requires, flag that requests such a layout).
    """
    is_deepspeed = text in mesh.ENGINES
    has_shards = layout.num_shards > 1 and not is_deepspeed
    if layout.num_ranks == 1:
        return
    if not has_shards:
        for name in SHARDING_SETTINGS:
            yield name, "a layout with shards", "--strategy fsdp"
    if layout.cp == 1:
        yield "cp_comm_strategy", "context parallelism", "--strategy cp"
    if not is_deepspeed:
        for name in DEEPSPEED_SETTINGS:
            yield name, "DeepSpeed", "--strategy zero2"


def _get_unless_default(options: ShardingOptions, name: str) -> Any:
    """Return an option of the script, or `UNSET` if it has the default value."""
    value = getattr(options, name)
    return UNSET if value == getattr(type(options), name) else value  # dataclass defaults are class attributes


def _get_name(unit: Any) -> str:
    return str(getattr(unit, "__name__", unit))


def _make_type_error(name: str, given: object, example: str) -> ConfigError:
    kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
    return ConfigError(f"{name} is of type {kind}; give {name}={example}")
