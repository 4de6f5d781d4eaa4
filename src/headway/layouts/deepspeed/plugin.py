"""Accelerate's plugin for DeepSpeed's settings, and the choice between the script's and the launcher's settings.

This module does not import torch. `headway.layouts.deepspeed.config` fills in the "auto" values of DeepSpeed's JSON,
and reports how each key was handled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.common.object_path import expand_home
from headway.core.config.launch import DEEPSPEED_SETTINGS, OFFLOAD_DEVICES, UNSET
from headway.core.config.load import resolve_run_setting
from headway.core.config.mesh import ENGINES
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.json_config import AUTO, HfDeepSpeedConfig

STAGES = (1, 2, 3)
"""Supported ZeRO stages."""
DEFAULT_STAGE = 2
"""ZeRO stage that is used if none is requested."""
_FIELDS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Dotted name in DeepSpeed's JSON that corresponds to each field of `DeepSpeedPlugin`, by field name."""


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's settings, with Accelerate's names and defaults, for `Accelerator(deepspeed_plugin=...)`.

    DeepSpeed then runs forward, backward and update. A value given here replaces an "auto" in the JSON. If the JSON has
    a different value, an error names both. All fields but `is_train_batch_min` are None by default.

    Attributes:
        hf_ds_config: DeepSpeed's JSON: a dict, a path, or its text. None: it is created from the other fields.
        gradient_accumulation_steps: Micro-batches per update. None or "auto": the Accelerator's number is used.
        gradient_clipping: Largest gradient norm. None or "auto": the argument of `clip_grad_norm_` is used.
        zero_stage: ZeRO stage 1, 2 or 3. None: the stage in the JSON, or 2 if the JSON has none.
        is_train_batch_min: Whether DeepSpeed is configured with the smallest of the loaders' batch sizes. False: with
            the largest. Default: True.
        offload_optimizer_device: Device for optimizer state: "none", "cpu" or "nvme" (which needs a path). None: as in
            the JSON.
        offload_param_device: Device for parameters: "none", "cpu" or "nvme" (which needs a path). "cpu" and "nvme" need
            stage 3. None: as in the JSON.
        offload_optimizer_nvme_path: Folder for optimizer state on NVMe. None: as in the JSON.
        offload_param_nvme_path: Folder for parameters on NVMe. None: as in the JSON.
        zero3_init_flag: False or None; True is not supported. The full model is built, then partitioned in prepare().
        zero3_save_16bit_model: Whether DeepSpeed gathers 16-bit weights when it saves a model itself. Headway's
            checkpoints and `save_model` do not need it. None: as in the JSON.
        transformer_moe_cls_names: Class names, separated by commas, of blocks whose parameters ZeRO-3 gathers all at
            once. None: each module's parameters are gathered separately.
        enable_msamp: False or None; True is not supported.
        msamp_opt_level: Ignored, because MS-AMP is not supported.

    Raises:
        ConfigError: If the JSON is invalid, a field contradicts it, a device is unknown, or an offload lacks its path
            or its stage.
        UnsupportedError: If ZeRO stage 0, MS-AMP or `zero3_init_flag=True` is requested.

    Example::

        plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")
        accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        if self.enable_msamp:
            raise UnsupportedError("enable_msamp: MS-AMP is not supported; use mixed_precision='bf16'")
        if self.zero3_init_flag:
            raise UnsupportedError(
                "zero3_init_flag=True: the full model is built on each process and partitioned in prepare(). Leave the flag out. If "
                "the model does not fit, use strategy='fsdp', which supports models on the meta device"
            )
        _check_offloads(self)
        self.hf_ds_config = HfDeepSpeedConfig({} if self.hf_ds_config in (None, "none") else self.hf_ds_config)
        self._merge_fields()
        self.zero_stage = _check_stage(self.hf_ds_config)
        self.zero3_init_flag = False

    def _merge_fields(self) -> None:
        """Write the fields into the JSON, and set the default ZeRO stage if neither sets one.

        Raises:
            ConfigError: If fields contradict the JSON. The message contains all contradictions. Also if the JSON's
                `zero_optimization` is a boolean.
        """
        config: HfDeepSpeedConfig = self.hf_ds_config
        if isinstance(config.config.get("zero_optimization"), bool):
            raise ConfigError("zero_optimization is true or false, DeepSpeed's oldest form; give {'stage': 1, 2 or 3}")
        problems = []
        for field, key in _FIELDS.items():
            value = getattr(self, field)
            json_value = config.get_value(key)
            if value is None or value == AUTO or json_value == value:
                continue
            if json_value is None or json_value == AUTO:
                config.set_value(key, value)
            else:
                problems.append(f"{field}={value!r}, but {key}={json_value!r} in the JSON")
        if problems:
            raise ConfigError(f"DeepSpeedPlugin contradicts itself: {'; '.join(problems)}; give each only once")
        if config.get_value("zero_optimization.stage") in (None, AUTO):
            config.set_value("zero_optimization.stage", DEFAULT_STAGE)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's JSON as a dict."""
        return self.hf_ds_config.config  # type: ignore[no-any-return]

    @property
    def precision(self) -> str | None:
        """Mixed precision that the JSON enables: "bf16", "fp16" or None."""
        for name in ("bf16", "fp16"):
            if self.hf_ds_config.get_value(f"{name}.enabled") is True:
                return name
        return None

    @property
    def num_steps(self) -> int | None:
        """Number of micro-batches per optimizer step that the JSON sets, or None if it sets none or "auto"."""
        value = self.hf_ds_config.get_value("gradient_accumulation_steps")
        return value if isinstance(value, int) else None

    def build_strategy(self, collectives: Any, options: Any, number_format: str, is_deferred: bool) -> Any:
        """Return the strategy that trains with DeepSpeed.

        Args:
            collectives: Collectives over all processes.
            options: Options from `kwargs_handlers`, such as those of GradScaler.
            number_format: Mixed precision of the run, such as "bf16".
            is_deferred: Whether gradients are reduced only once per accumulation window, after its last backward.

        Raises:
            UnsupportedError: If float8 or automatic micro-batching is requested.
            OptionalDependencyMissing: If DeepSpeed is not installed.
        """
        if number_format == "fp8":
            raise UnsupportedError(
                "mixed_precision='fp8' is not supported with DeepSpeed; use strategy='fsdp', or mixed_precision='bf16'"
            )
        if is_deferred:
            raise UnsupportedError(
                "microbatching='auto' is not supported with DeepSpeed; leave it out, or use strategy='fsdp'"
            )
        from headway.layouts.deepspeed.strategy import DeepSpeedStrategy  # imports torch and DeepSpeed

        return DeepSpeedStrategy(collectives, self, options)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted name in the JSON, or the default if the name is missing.

        Args:
            ds_key_long: Dotted name, such as "zero_optimization.stage".
            default: Value to return if the name is missing. Default: None.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the JSON sets a dotted name to "auto"."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))


def _check_offloads(plugin: DeepSpeedPlugin) -> None:
    """Check the plugin's offload devices, and replace the path "none", Accelerate's word for no path, with None.

    Raises:
        ConfigError: If a device is unknown, or if the device is "nvme" and its path is missing.
    """
    for target in ("optimizer", "param"):
        device, path = getattr(plugin, f"offload_{target}_device"), getattr(plugin, f"offload_{target}_nvme_path")
        if device is not None and device not in OFFLOAD_DEVICES:
            raise ConfigError(f"offload_{target}_device={device!r}; allowed: {', '.join(OFFLOAD_DEVICES)}")
        if device == "nvme" and path in (None, "none"):
            raise ConfigError(f"offload_{target}_device='nvme' needs offload_{target}_nvme_path")
        if path == "none":
            setattr(plugin, f"offload_{target}_nvme_path", None)


def _check_stage(config: HfDeepSpeedConfig) -> int:
    """Return the ZeRO stage that the JSON sets.

    Raises:
        UnsupportedError: If the stage is 0.
        ConfigError: If the stage is not a ZeRO stage, or if parameters are offloaded below stage 3.
    """
    stage = config.get_value("zero_optimization.stage")
    if stage == 0:
        raise UnsupportedError("ZeRO stage 0 shards nothing; leave the plugin out to train replicas with DDP")
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(f"zero_stage={stage!r}; allowed: 1, 2, 3")
    if stage < 3 and config.get_value("zero_optimization.offload_param.device") in ("cpu", "nvme"):
        raise ConfigError(f"offload_param needs ZeRO stage 3, where parameters are sharded; the stage is {stage}")
    return int(stage)


def choose_plugin(strategy: str, script_plugin: Any, origin: str) -> DeepSpeedPlugin | None:
    """Return the plugin with the DeepSpeed settings that apply to this run, or None if DeepSpeed is not requested.

    The script's plugin is used as it is: settings from configuration files and environment variables are not merged
    into it. They apply only if the script gives no plugin. DeepSpeed options on the command line contradict a script's
    plugin. They raise an error, or, with `--force`, replace the whole plugin.

    Args:
        strategy: Requested strategy. "ddp" if none was requested.
        script_plugin: `deepspeed_plugin` or `deepspeed_plugins` of the Accelerator. None: the script gives no plugin.
        origin: File and line of the script, for error messages.

    Raises:
        ConfigError: If the script's argument is not a `DeepSpeedPlugin`. Also if the plugin contradicts the strategy,
            its ZeRO stage or the command line, or if the launcher's settings are invalid.
        UnsupportedError: If several plugins are given, or the launcher's settings request an unsupported feature.
    """
    if script_plugin is not None and _is_overridden(script_plugin, origin):
        script_plugin = None
    return match_plugin(strategy, script_plugin, read_launched_settings())


def _is_overridden(script_plugin: Any, origin: str) -> bool:
    """Whether a DeepSpeed option on the command line replaces the script's plugin. This needs `--force`.

    Raises:
        ConfigError: If the command line has such an option, but not `--force`.
    """
    for name in DEEPSPEED_SETTINGS:
        # A plugin never equals an option's value, so each option on the command line counts as a contradiction.
        _, value_origin = resolve_run_setting(name, script_plugin, None, code_origin=f"deepspeed_plugin of {origin}")
        if not value_origin.startswith("code"):
            return True
    return False


def read_launched_settings() -> dict[str, Any]:
    """Return the DeepSpeed settings from the launcher or the environment, by field of `DeepSpeedPlugin`.

    Settings without a value are left out.
    """
    settings = {}
    for name in DEEPSPEED_SETTINGS:
        value, _ = resolve_run_setting(name, UNSET, None)
        if value is not None:
            is_file = name == "deepspeed_config_file"
            settings["hf_ds_config" if is_file else name] = expand_home(value) if is_file else value
    return settings


def match_plugin(
    strategy: str, script_plugin: Any, launched_settings: Mapping[str, Any] | None = None
) -> DeepSpeedPlugin | None:
    """Return the DeepSpeed plugin for the requested strategy, or None if DeepSpeed is not requested.

    DeepSpeed is requested by a plugin, or by a strategy such as "deepspeed" or "zero3".

    Args:
        strategy: Requested strategy. "ddp" if none was requested.
        script_plugin: `deepspeed_plugin` or `deepspeed_plugins` of the Accelerator: a plugin, a dict with one plugin,
            or None.
        launched_settings: Fields of the plugin to create if the strategy requests DeepSpeed and the script gives no
            plugin. Default: None, no fields but the strategy's ZeRO stage.

    Raises:
        ConfigError: If the script's argument is not a plugin, or contradicts the strategy or its ZeRO stage. Also if
            the launched settings are invalid.
        UnsupportedError: If several plugins are given, or the launched settings request an unsupported feature.
    """
    plugin = script_plugin
    if isinstance(script_plugin, Mapping):
        if len(script_plugin) != 1:
            raise UnsupportedError("several DeepSpeed plugins are not supported; give one plugin")
        plugin = next(iter(script_plugin.values()))
    name = strategy.strip().lower()
    is_requested = name in ENGINES
    stage = int(name.removeprefix("zero")) if is_requested and name.startswith("zero") else None
    if plugin is None:
        return DeepSpeedPlugin(**{"zero_stage": stage, **(launched_settings or {})}) if is_requested else None
    if not isinstance(plugin, DeepSpeedPlugin):
        raise ConfigError(f"deepspeed_plugin is a {type(plugin).__name__}; give a headway.DeepSpeedPlugin")
    if not is_requested and name != "ddp":
        raise ConfigError(f"deepspeed_plugin and strategy={strategy!r} ask for different engines; give one")
    if stage is not None and stage != plugin.zero_stage:
        raise ConfigError(
            f"strategy={strategy!r}, but the DeepSpeed plugin has zero_stage={plugin.zero_stage}; give one"
        )
    return plugin
