"""Translation of Accelerate's config files: each key becomes a setting, or a report explains why it does not.

This module also lists flags of other launchers that Headway does not have, with an alternative for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.compat.accelerate.launching.layout_words import LAYOUT_SECTIONS, explain_layout_key
from headway.core.config.launch import SETTINGS, LaunchConfig
from headway.core.config.layout_request import LayoutRequest
from headway.core.config.load import SettingValue, merge_layers
from headway.core.config.values import check_file_value, suggest_word
from headway.errors import ConfigError

_SHARDING = "set the layout with --strategy fsdp, and see `headway launch --help-all` for its options"
_DEEPSPEED = "DeepSpeed is a strategy: --strategy zero2, with --deepspeed_config_file where it has a JSON"
_MESH = "sizes are part of the layout: --strategy fsdp+tp=2"
_MEGATRON = "Headway does not drive Megatron-LM"
_FP8 = "float8 runs through torchao: --mixed_precision fp8, and its options in the script: kwargs_handlers=[Float8Options(...)]"
_TPU = "TPUs need torch_xla, which Headway does not drive"
_SAGEMAKER = "Headway does not talk to SageMaker; run `headway launch` inside the job's container"
_MPI = "start the launcher through MPI itself: mpirun -n MACHINES headway launch SCRIPT"

_NAMES_BY_ADVICE = {
    _SHARDING: "fsdp hsdp",
    _DEEPSPEED: "deepspeed deepspeed_config",
    _MESH: "tp tp_size tensor_parallel_size dp_shard_size dp_replicate_size cp_size pp_size sp_size",
    _MEGATRON: "use_megatron_lm",
    _TPU: "tpu tpu_cluster no_tpu_cluster tpu_use_sudo vm downcast_bf16",
    f"{_TPU}; set variables before the command: NAME=value headway launch SCRIPT": "env",
    f"{_TPU}; other runs start SCRIPT itself": "main_training_function",
    _SAGEMAKER: "aws_access_key_id aws_secret_access_key",
    _MPI: "mpirun_hostfile mpirun_ccl",
    "accelerators are found by themselves; take the flag out": "use_xpu use_mps_device",
    "Intel's extension is part of torch now; take the flag out": "ipex",
    "it has no effect here: machines meet at --main_process_ip and --main_process_port": "same_network",
    "take it out: on one machine the launcher binds a free port by itself": "standalone",
    "use --strategy": "layout",
    "use --fsdp_offload_params true": "offload_params",
    "use -n": "num_gpus devices",
    "use -n for the processes of all machines together": "nproc_per_node nproc",
    "use --num_machines": "nnodes",
    "use --machine_rank": "node_rank",
    "use --main_process_ip": "master_addr",
    "use --main_process_port": "master_port",
    "use --main_process_ip and --main_process_port": "rdzv_endpoint",
}
_ADVICE_BY_NAME = {name: answer for answer, names in _NAMES_BY_ADVICE.items() for name in names.split()}
_ADVICE_BY_PREFIX = {"megatron_lm_": _MEGATRON, "fp8_": _FP8, "sagemaker_": _SAGEMAKER, "tpu_": _TPU}
_FILE_ONLY_KEYS = ("compute_environment", "distributed_type", "use_cpu", "commands", "command_file")


def find_alternative(name: str) -> str | None:
    """Return advice on what to use instead of a flag or config key that only other launchers have.

    None if no other launcher has a flag or key with this name.

    Args:
        name: Name of the flag or key.
    """
    plain_name = name.lstrip("-").replace("-", "_")
    if plain_name in _ADVICE_BY_NAME:
        return _ADVICE_BY_NAME[plain_name]
    return next((text for prefix, text in _ADVICE_BY_PREFIX.items() if plain_name.startswith(prefix)), None)


def explain_file_key(key: str) -> str:
    """Return a hint for an unknown key in Headway's config file if it is a config key or launch flag of Accelerate.

    Return "" for any other key.
    """
    if key.endswith("_config") or key in _FILE_ONLY_KEYS or find_alternative(key):
        return "; this looks like a file of Accelerate's: `headway config import FILE` translates it"
    hint = explain_layout_key(key)
    return "" if hint is None else f": {hint}"


def refuse_accelerate_flag(flag: str) -> None:
    """Raise an error if only other launchers have a flag. Otherwise do nothing.

    Raises:
        ConfigError: If another launcher has the flag and Headway does not. The message names an alternative.
    """
    alternative = find_alternative(flag)
    if alternative is not None:
        raise ConfigError(f"{flag} is not a flag of `headway launch`: {alternative}")


_RENAMED_KEYS = {"use_cpu": "cpu"}
_UNCHANGED_KEYS = tuple(
    """
    num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids mixed_precision rdzv_backend
    enable_cpu_affinity debug gradient_accumulation_steps
    """.split()  # noqa: SIM905
)
_DYNAMO_SETTINGS = tuple(name for name in SETTINGS if name.startswith("dynamo_"))
# Sections in which most keys have no counterpart in Headway.
_UNSUPPORTED_SECTIONS = tuple("megatron_lm_config fp8_config dynamo_config mpirun_config ipex_config".split())  # noqa: SIM905
_RENAMED_OPTIONS = {"backward_prefetch_policy": "backward_prefetch"}
"""Current names of config file keys, by the names in files of older Accelerate versions."""
_NEEDLESS_TYPES = {"NO": "one process, or as many as num_processes requests", "MULTI_CPU": "processes on the CPU"}
_PER_DEVICE = "a launch starts one process per accelerator by default"
"""Reason why the distributed types MULTI_GPU, MULTI_XPU, MULTI_NPU and similar ones need no setting."""

COMBINED_KEY = "together"
"""Key in the report for the layout that results from several keys of the file."""

_EMPTY_VALUES: tuple[object, ...] = (None, False, "", "no", {}, [])


@dataclass
class Translation:
    """Result of translating one of Accelerate's config files.

    Attributes:
        layer: Headway's settings that result from the file.
        lines: Lines of the report: pairs of (key, description of its translation).
        num_lost: Number of keys that Headway has no setting for.
        layout: Layout that the file requests.
    """

    layer: dict[str, SettingValue] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    num_lost: int = 0
    layout: LayoutRequest = field(default_factory=LayoutRequest)

    @property
    def config(self) -> LaunchConfig:
        """Launch configuration that results from the file."""
        return merge_layers([self.layer]).config

    @property
    def num_keys(self) -> int:
        """Number of keys in the file, including those inside sections."""
        return len({key for key, _ in self.lines} - {COMBINED_KEY})

    def set_from_key(self, key: str, name: str, value: Any, origin: str) -> None:
        """Set one of Headway's settings from the value of a key, and add a line about the key to the report `lines`.

        Args:
            key: Key in the file.
            name: Name of Headway's setting.
            value: Value in the file.
            origin: Location of the key. Error messages contain it, and it is stored as the origin of the setting.

        Raises:
            ConfigError: If the setting does not accept the value.
        """
        checked_value = check_file_value(SETTINGS[name], value, origin)
        self.layer[name] = SettingValue(checked_value, origin)
        self.lines.append((key, f"{name}: {checked_value!r}"))

    def report_needless(self, key: str, reason: str) -> None:
        """Report that a key needs no setting, because it is empty or requests what Headway does anyway.

        Args:
            key: Key in the file.
            reason: Reason why no setting is needed.
        """
        self.lines.append((key, f"nothing to keep: {reason}"))

    def report_lost(self, key: str, reason: str) -> None:
        """Report that Headway cannot do what a key requests, because it has no setting for the key.

        Args:
            key: Key in the file.
            reason: Reason why Headway has no such setting.
        """
        self.lines.append((key, f"NOT KEPT: {reason}"))
        self.num_lost += 1


def translate_config(data: Mapping[str, Any], name: str) -> Translation:
    """Return the translation of an Accelerate config file to Headway's settings, with a report on each key.

    Args:
        data: Keys and values of the file.
        name: Name of the file in error messages.

    Raises:
        ConfigError: If a key is not one of Accelerate's keys, if a value is invalid, or if the file is for SageMaker.
    """
    translation = Translation()
    for key, value in data.items():
        _translate_key(translation, key, value, f"file: {name} key {key}")
    layout_settings = dict(translation.layout.settings)
    strategy = translation.layout.find_strategy()
    if strategy is not None:
        layout_settings["strategy"] = strategy
        translation.lines.append((COMBINED_KEY, f"strategy: {strategy.value!r}"))
    for setting, requested in layout_settings.items():
        origin = f"file: {name} key {requested.key}"
        translation.layer[setting] = SettingValue(check_file_value(SETTINGS[setting], requested.value, origin), origin)
    return translation


def _translate_key(translation: Translation, key: str, value: Any, origin: str) -> None:
    """Translate one key of an Accelerate config file, and add it to the report.

    Args:
        translation: Translation to change.
        key: Key in the file.
        value: Value of the key. For a section, a mapping.
        origin: Location of the key, for error messages and as the origin of settings.

    Raises:
        ConfigError: If the key is not one of Accelerate's, the value is invalid, or the file is for SageMaker.
    """
    if key == "distributed_type":
        _translate_type(translation, str(value), origin)
    elif key == "compute_environment":
        if value == "AMAZON_SAGEMAKER":
            raise ConfigError(f"{origin} is AMAZON_SAGEMAKER: {find_alternative('sagemaker_')}")
        translation.report_needless(key, "a launch runs on the machine that it is started on")
    elif key in LAYOUT_SECTIONS:
        _translate_layout(translation, key, value, origin)
    elif key in _UNSUPPORTED_SECTIONS:
        _translate_section(translation, key, value, origin)
    elif key in _RENAMED_KEYS or key in _UNCHANGED_KEYS:
        _translate_value(translation, key, value, origin)
    elif key in ("command_file", "commands") or key.startswith("tpu_"):
        _translate_unknown(translation, key, value, str(find_alternative("tpu")))
    elif (alternative := find_alternative(key)) is not None:
        _translate_unknown(translation, key, value, alternative)
    else:
        hint = suggest_word(key, [*_UNCHANGED_KEYS, *_RENAMED_KEYS, *_UNSUPPORTED_SECTIONS, *LAYOUT_SECTIONS])
        raise ConfigError(f"{key} ({origin}) is not a key of Accelerate's config files{hint or '; take it out'}")


def _read_section(translation: Translation, section: str, value: Any, origin: str) -> Mapping[str, Any]:
    """Return the keys and values of a section in Accelerate's config file. Report an empty section and return {}.

    Args:
        translation: Translation whose report gets a line about an empty section.
        section: Name of the section.
        value: Value of the section.
        origin: Location of the section, for error messages.

    Raises:
        ConfigError: If the value is not a mapping.
    """
    if value in _EMPTY_VALUES:
        translation.report_needless(section, "empty")
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin} must contain settings, one per line, not {value!r}")
    return value


def _translate_layout(translation: Translation, section: str, value: Any, origin: str) -> None:
    """Translate a section of Accelerate's config file that describes the layout, such as `fsdp_config`.

    The section's keys are added to the requested layout and to the report. The layout itself is determined after the
    entire file has been read.

    Args:
        translation: Translation to change.
        section: Name of the section.
        value: Value of the section.
        origin: Location of the section. Error messages contain it, and it is stored as the origin of settings.
    """
    layout, keys = translation.layout, LAYOUT_SECTIONS[section]
    for inner, entry in _read_section(translation, section, value, origin).items():
        path = f"{section}.{inner}"
        name = str(inner).removeprefix(keys.prefix)
        name = _RENAMED_OPTIONS.get(name, name)
        if inner == "gradient_accumulation_steps" and entry not in ("auto", None):
            translation.set_from_key(path, inner, entry, f"{origin}.{inner}")
        elif entry in ("auto", None) or (entry in _EMPTY_VALUES and isinstance(entry, (str, list, dict))):
            translation.report_needless(path, "undecided")
        elif name not in keys.known_keys:
            translation.report_lost(path, "Accelerate's files have no such key")
        else:
            num_reported = len(layout.lines)
            keys.read_key(layout, name, entry, path)
            translation.lines += layout.lines[num_reported:]
            if path in layout.refused:
                translation.report_lost(path, layout.refused[path])


def _translate_type(translation: Translation, distributed_type: str, origin: str) -> None:
    """Translate the key `distributed_type`: request a layout, or report that it needs no setting or has none.

    Args:
        translation: Translation to change.
        distributed_type: Value of the key, such as "MULTI_GPU".
        origin: Location of the key, for error messages and as the origin of settings.
    """
    if distributed_type in ("FSDP", "DEEPSPEED"):
        if distributed_type == "FSDP":
            translation.layout.use_shards("distributed_type")
            consequence = "the model is sharded"
        else:
            translation.layout.use_deepspeed("distributed_type")
            consequence = "its engine runs the model"
        translation.lines.append(("distributed_type", f"{distributed_type}: {consequence}"))
        return
    reason = _NEEDLESS_TYPES.get(distributed_type, _PER_DEVICE if distributed_type.startswith("MULTI_") else None)
    if reason is None:
        alternative = (
            find_alternative(f"use_{distributed_type.lower()}")
            or find_alternative(distributed_type.lower())
            or find_alternative("tpu")
        )
        translation.report_lost("distributed_type", f"{distributed_type}: {alternative}")
        return
    translation.report_needless("distributed_type", f"{distributed_type}: {reason}")
    if distributed_type == "MULTI_CPU":
        translation.set_from_key("distributed_type", "cpu", True, origin)


def _translate_section(translation: Translation, key: str, value: Any, origin: str) -> None:
    """Translate a section such as `dynamo_config`. Only keys that are settings of Headway are kept.

    Args:
        translation: Translation to change.
        key: Key of the section.
        value: The section, as read from the file.
        origin: Place of the section in the file, for messages.
    """
    for inner, entry in _read_section(translation, key, value, origin).items():
        path = f"{key}.{inner}"
        if inner in _DYNAMO_SETTINGS and entry is not None:
            translation.set_from_key(
                path, inner, entry.lower() if isinstance(entry, str) else entry, f"{origin}.{inner}"
            )
        elif entry in _EMPTY_VALUES:
            translation.report_needless(path, "off")
        else:
            translation.report_lost(
                path,
                find_alternative(str(inner))
                or find_alternative(f"{key.removesuffix('_config')}_")
                or "no counterpart here",
            )


def _translate_value(translation: Translation, key: str, value: Any, origin: str) -> None:
    """Set the setting that has the key's name or replaces it, unless Accelerate's file leaves the value open."""
    name = _RENAMED_KEYS.get(key, key)
    if value is None or (key == "num_processes" and value == -1):
        translation.report_needless(key, "undecided")
    else:
        translation.set_from_key(key, name, value, origin)


def _translate_unknown(translation: Translation, key: str, value: Any, reason: str) -> None:
    """Report a key without a setting: as lost for this reason, unless its value is empty or changes nothing."""
    # Accelerate writes `main_training_function: main` into every file.
    if value in _EMPTY_VALUES or (key, value) == ("main_training_function", "main") or key == "same_network":
        translation.report_needless(key, "off" if value in _EMPTY_VALUES else "it changes nothing here")
    else:
        translation.report_lost(key, reason)
