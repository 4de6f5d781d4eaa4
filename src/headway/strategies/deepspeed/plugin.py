"""DeepSpeed's settings as requested: its JSON from any source, and Accelerate's plugin. Torch-free.

`headway.strategies.deepspeed.config` fills in what the JSON leaves to the run, and accounts for every key.

Accelerate's stand-ins for an optimizer and a schedule that DeepSpeed's JSON defines. Torch-free.
"""

import base64
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.common.untrusted import parse_json, shown
from headway.config.engines import EngineOptions
from headway.config.launch import OF_DEEPSPEED, OFFLOADS, UNSET
from headway.config.layout_choice import RequestedLayout, ResolvedLayout
from headway.config.load import run_setting
from headway.config.mesh import ENGINES
from headway.errors import ConfigError, UnsupportedError
from headway.runtime.process import ProcessRuntime

AUTO = "auto"
STAGES = (1, 2, 3)
DEFAULT_STAGE = 2


class HfDeepSpeedConfig:
    """DeepSpeed's JSON with questions by dotted names, as transformers and Accelerate ask them.

    Args:
        config_file_or_dict: a dict, a path, the JSON itself or its base64; another such object. What is given is copied.

    Attributes:
        config: the dict.

    Raises:
        ConfigError: none of these, or JSON that is not an object.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """The section that a dotted name lies in, or None, and the last part of the name."""
        node: Any = self.config
        *sections, key = ds_key_long.split(".")
        for section in sections:
            node = node.get(section) if isinstance(node, Mapping) else None
        return (node if isinstance(node, Mapping) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value under a dotted name."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Put a value under a dotted name; sections are made where they are not there."""
        node = self.config
        *sections, key = ds_key_long.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Take out what lies under a dotted name.

        Raises:
            ConfigError: it is not there, and `must_exist` was asked for.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is None or key not in node:
            if must_exist:
                raise ConfigError(f"DeepSpeed's configuration has no {ds_key_long!r}")
            return
        del node[key]

    def is_true(self, ds_key_long: str) -> bool:
        """Is it set, and true?"""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Is it set, and false?"""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_auto(self, ds_key_long: str) -> bool:
        """Is it left to the run?"""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero2(self) -> bool:
        """ZeRO stage 2?"""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """ZeRO stage 3?"""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Does anything lie in host memory or on a disk?"""
        kinds = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{kind}.device") in ("cpu", "nvme") for kind in kinds)


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return deepcopy(dict(given))
    if isinstance(getattr(given, "config", None), Mapping):
        return deepcopy(dict(given.config))
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"hf_ds_config is a {type(given).__name__}; give a dict, the path of a JSON file, or an HfDeepSpeedConfig"
        )
    text, source = str(given), "hf_ds_config"
    try:
        if Path(given).is_file():
            text, source = Path(given).read_text(encoding="utf-8"), str(given)
    except (OSError, ValueError):  # the JSON itself, too long for a path
        pass
    made = _parsed(text, source)
    if not isinstance(made, dict):
        raise ConfigError(f"{source} holds a {type(made).__name__}; DeepSpeed's configuration is a JSON object")
    return made


def _parsed(text: str, source: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        if source != "hf_ds_config" or text.lstrip().startswith("{"):
            raise ConfigError(f"{source} is not JSON: {error}") from None
    try:
        return parse_json(base64.b64decode(text, altchars=b"-_", validate=True))
    except ValueError:
        raise ConfigError(
            f"hf_ds_config={shown(text)}: there is no such file, and it is neither JSON nor base64 of JSON"
        ) from None


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's settings by Accelerate's names and defaults.

    A value given here fills an "auto" of the JSON; where the JSON has another value, both are named in an error.

    Attributes:
        hf_ds_config: the JSON: a dict, a path, its text; None: made from the other fields.
        gradient_accumulation_steps: None or "auto": the Accelerator's.
        gradient_clipping: None or "auto": what `clip_grad_norm_` is called with.
        zero_stage: 1, 2 or 3; None: 2.
        is_train_batch_min: with several loaders, the smallest batch size is the one DeepSpeed is told; False: the largest.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme" (with a path).
        zero3_init_flag: only False or None: a model is built whole, and parted at prepare().
        zero3_save_16bit_model: goes into the JSON; checkpoints and `save_model` of Headway need no such thing.
        transformer_moe_cls_names: class names of blocks that ZeRO-3 fetches whole, joined by commas.
        enable_msamp, msamp_opt_level: not served.
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
                "zero3_init_flag=True: a model is built whole on each process and partitioned in prepare(). Leave the flag out. If "
                "the model does not fit, use strategy='fsdp', which supports models on the meta device"
            )
        _check_offloads(self)
        self.hf_ds_config = HfDeepSpeedConfig({} if self.hf_ds_config in (None, "none") else self.hf_ds_config)
        self._merge()
        self.zero_stage = _stage(self.hf_ds_config)
        self.zero3_init_flag = False

    def _merge(self) -> None:
        """Fields into the JSON, and all that contradicts told at once."""
        config: HfDeepSpeedConfig = self.hf_ds_config
        if isinstance(config.config.get("zero_optimization"), bool):
            raise ConfigError("zero_optimization is true or false, DeepSpeed's oldest form; give {'stage': 1, 2 or 3}")
        problems = []
        for field, key in _FIELDS.items():
            value = getattr(self, field)
            there = config.get_value(key)
            if value is None or value == AUTO or there == value:
                continue
            if there is None or there == AUTO:
                config.set_value(key, value)
            else:
                problems.append(f"{field}={value!r}, but {key}={there!r} in the JSON")
        if problems:
            raise ConfigError(f"DeepSpeedPlugin contradicts itself: {'; '.join(problems)}; give each only once")
        if config.get_value("zero_optimization.stage") in (None, AUTO):
            config.set_value("zero_optimization.stage", DEFAULT_STAGE)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The JSON."""
        return self.hf_ds_config.config  # type: ignore[no-any-return]

    @property
    def precision(self) -> str | None:
        """The mixed precision that the JSON names; None: none."""
        for name in ("bf16", "fp16"):
            if self.hf_ds_config.get_value(f"{name}.enabled") is True:
                return name
        return None

    @property
    def num_steps(self) -> int | None:
        """The accumulation that the JSON names; None: none."""
        value = self.hf_ds_config.get_value("gradient_accumulation_steps")
        return value if isinstance(value, int) else None

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The JSON's value under a dotted name."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Does the JSON leave it to the run?"""
        return bool(self.hf_ds_config.is_auto(ds_key_long))


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


def _check_offloads(plugin: DeepSpeedPlugin) -> None:
    for what in ("optimizer", "param"):
        device, path = getattr(plugin, f"offload_{what}_device"), getattr(plugin, f"offload_{what}_nvme_path")
        if device is not None and device not in OFFLOADS:
            raise ConfigError(f"offload_{what}_device={device!r}; allowed: {', '.join(OFFLOADS)}")
        if device == "nvme" and path in (None, "none"):
            raise ConfigError(f"offload_{what}_device='nvme' needs offload_{what}_nvme_path")
        if path == "none":
            setattr(plugin, f"offload_{what}_nvme_path", None)


def _stage(config: HfDeepSpeedConfig) -> int:
    stage = config.get_value("zero_optimization.stage")
    if stage == 0:
        raise UnsupportedError("ZeRO stage 0 shards nothing; leave the plugin out to train replicas with DDP")
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(f"zero_stage={stage!r}; allowed: 1, 2, 3")
    if stage < 3 and config.get_value("zero_optimization.offload_param.device") in ("cpu", "nvme"):
        raise ConfigError(f"offload_param needs ZeRO stage 3, where parameters are sharded; the stage is {stage}")
    return int(stage)


def resolve(requested: RequestedLayout, options: EngineOptions, runtime: ProcessRuntime, given: Any) -> ResolvedLayout:
    """The layout on a run's ranks, with DeepSpeed's settings where that is the engine: the script's plugin, or what was launched.

    Args:
        requested: what the script says.
        options: the engines' options of the script.
        runtime: the ranks.
        given: `deepspeed_plugin`, or `deepspeed_plugins`.

    Raises:
        ConfigError: as `RequestedLayout.resolve` and `chosen_plugin`, or the command line contradicts the plugin.
    """
    resolved = requested.resolve(options, runtime.world_size, runtime.local_world_size)
    for name in OF_DEEPSPEED if given is not None else ():
        # With --force the command line may say its options instead.
        _, by = run_setting(name, given, None, code_origin=f"deepspeed_plugin of {requested.origin}")
        given = given if by.startswith("code") else None
    return replace(resolved, deepspeed=chosen_plugin(resolved.text, given, launched_settings()))


def launched_settings() -> dict[str, Any]:
    """What the launcher says for a DeepSpeedPlugin, by its fields; empty where it says nothing."""
    told = {name: run_setting(name, UNSET, None)[0] for name in OF_DEEPSPEED}
    found = {name: value for name, value in told.items() if value is not None}
    if "deepspeed_config_file" in found:
        found["hf_ds_config"] = found.pop("deepspeed_config_file")
    return found


def chosen_plugin(strategy: str, given: Any, launched: Mapping[str, Any] | None = None) -> DeepSpeedPlugin | None:
    """What the Accelerator's arguments say about DeepSpeed; None: another engine is meant.

    Args:
        strategy: as it was asked for; "ddp" where nobody asked.
        given: `deepspeed_plugin`, or `deepspeed_plugins`.
        launched: what the launcher says, by the plugin's fields; for a plugin that the script does not make.

    Raises:
        ConfigError: something else than a plugin, two stages, or another strategy besides.
        UnsupportedError: several plugins.
    """
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise UnsupportedError("several DeepSpeed plugins are not supported; give one plugin")
        given = next(iter(given.values()))
    name = strategy.strip().lower()
    is_asked = name in ENGINES
    stage = int(name.removeprefix("zero")) if name.startswith("zero") else None
    if given is None:
        return DeepSpeedPlugin(**{"zero_stage": stage, **(launched or {})}) if is_asked else None
    if not isinstance(given, DeepSpeedPlugin):
        raise ConfigError(f"deepspeed_plugin is a {type(given).__name__}; give a headway.DeepSpeedPlugin")
    if not is_asked and strategy != "ddp":
        raise ConfigError(f"deepspeed_plugin and strategy={strategy!r} ask for different engines; give one")
    if stage is not None and stage != given.zero_stage:
        raise ConfigError(
            f"strategy={strategy!r}, but the DeepSpeed plugin has zero_stage={given.zero_stage}; give one"
        )
    return given


def precision(plugin: DeepSpeedPlugin | None) -> str:
    """The mixed precision of a run where nobody asked for one."""
    return "no" if plugin is None else plugin.precision or "no"


def unscaled(plugin: DeepSpeedPlugin | None, options: EngineOptions) -> EngineOptions:
    """Options for the precision: under DeepSpeed, which scales fp16 losses itself, torch's scaler stays off."""
    return options if plugin is None else replace(options, scaler=replace(options.scaler, enabled=False))


def steps(plugin: DeepSpeedPlugin | None, given: int | None, windows: object) -> int | None:
    """Micro-batches per update where the Accelerator is told so; else, and where no plugin for windows is given, the JSON's."""
    return given if plugin is None or given is not None or windows is not None else plugin.num_steps


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's JSON, over these parameters; prepare() gives the real one back.

    Args:
        params: parameters or groups.
        lr: learning rate, where the JSON says "auto".
        weight_decay: weight decay, where the JSON says "auto".
        kwargs: the same for others, by name.
    """

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule of DeepSpeed's JSON, or for what a function makes; prepare() gives the real one back.

    Args:
        optimizer: the optimizer, or its stand-in.
        total_num_steps: updates that a single process would make, where the JSON says "auto".
        warmup_num_steps: updates of warm-up, where the JSON says "auto".
        lr_scheduler_callable: makes the schedule from the optimizer.
        kwargs: others, by name, where the JSON says "auto".
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
