"""Translates a config file of Accelerate's: each key becomes a setting here, or is said to become none, and why.

Flags of other launchers that have no meaning here stand with them, and what to use in their place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.compat.accelerate.launching.layout_words import LAYOUT_SECTIONS, explain_key
from headway.config.launch import SETTINGS, LaunchConfig
from headway.config.load import Value, resolve
from headway.config.parallelism import LayoutRequest
from headway.config.values import did_you_mean, from_file
from headway.errors import ConfigError

_SHARDING = "set the layout with --strategy fsdp, and see `headway launch --help-all` for its options"
_DEEPSPEED = "DeepSpeed is a strategy: --strategy zero2, with --deepspeed_config_file where it has a JSON"
_MESH = "sizes are part of the layout: --strategy fsdp+tp=2"
_MEGATRON = "Headway does not drive Megatron-LM"
_FP8 = "float8 runs through torchao: --mixed_precision fp8, and its options in the script: kwargs_handlers=[Float8Options(...)]"
_TPU = "TPUs need torch_xla, which Headway does not drive"
_SAGEMAKER = "Headway does not talk to SageMaker; run `headway launch` inside the job's container"
_MPI = "start the launcher through MPI itself: mpirun -n MACHINES headway launch SCRIPT"

_BY_ANSWER = {
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
    "use -n": "num_gpus",
    "use -n for the processes of all machines together": "nproc_per_node nproc",
    "use --num_machines": "nnodes",
    "use --machine_rank": "node_rank",
    "use --main_process_ip": "master_addr",
    "use --main_process_port": "master_port",
    "use --main_process_ip and --main_process_port": "rdzv_endpoint",
}
_ONE = {name: answer for answer, names in _BY_ANSWER.items() for name in names.split()}
_FAMILIES = {"megatron_lm_": _MEGATRON, "fp8_": _FP8, "sagemaker_": _SAGEMAKER, "tpu_": _TPU}
_OF_FILES = ("compute_environment", "distributed_type", "use_cpu", "commands", "command_file")


def advice(name: str) -> str | None:
    """What to use in the place of the flag or key `name`; None where no other launcher has it either."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in _ONE:
        return _ONE[plain]
    return next((text for prefix, text in _FAMILIES.items() if plain.startswith(prefix)), None)


def explain_file_key(key: str) -> str:
    """What to do about a key of Accelerate's, or a flag of its launcher's, in a config file of Headway's; empty for any other."""
    if key.endswith("_config") or key in _OF_FILES or advice(key):
        return "; this looks like a file of Accelerate's: `headway config import FILE` translates it"
    said = explain_key(key)
    return "" if said is None else f": {said}"


def refuse(flag: str) -> None:
    """Raise where `flag` is one of another launcher.

    Raises:
        ConfigError: the flag is known and has no meaning here; the message says what to use.
    """
    text = advice(flag)
    if text is not None:
        raise ConfigError(f"{flag} is not a flag of `headway launch`: {text}")


_RENAMED = {"use_cpu": "cpu"}
_SAME = tuple(
    """
    num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids mixed_precision rdzv_backend
    enable_cpu_affinity debug gradient_accumulation_steps
    """.split()  # noqa: SIM905
)
_COMPILER = tuple(name for name in SETTINGS if name.startswith("dynamo_"))
# Sections most lines of which would mean something that this version does not do.
_SECTIONS = tuple("megatron_lm_config fp8_config dynamo_config mpirun_config ipex_config".split())  # noqa: SIM905
_RENAMED_OPTIONS = {"backward_prefetch_policy": "backward_prefetch"}
"""What older versions of Accelerate wrote."""
_TYPES = {"NO": "one process, or as many as num_processes says", "MULTI_CPU": "processes on the CPU"}
_PER_DEVICE = "a launch starts one process per accelerator by default"
"""MULTI_GPU, MULTI_XPU, MULTI_NPU and the like."""

TOGETHER = "together"
"""Under this name stands the layout that several keys come to."""

_NOTHING: tuple[object, ...] = (None, False, "", "no", {}, [])


@dataclass
class Translation:
    """What became of a foreign file.

    Attributes:
        layer: the settings that it decides.
        lines: for each of its keys, (key, what it became).
        num_lost: keys whose meaning this version cannot keep.
        layout: what its keys say of the layout.
    """

    layer: dict[str, Value] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    num_lost: int = 0
    layout: LayoutRequest = field(default_factory=LayoutRequest)

    @property
    def config(self) -> LaunchConfig:
        """The settings as a configuration."""
        return resolve([self.layer]).config

    @property
    def num_keys(self) -> int:
        """Keys of the file, those of its sections one by one."""
        return len({key for key, _ in self.lines} - {TOGETHER})

    def take(self, key: str, name: str, value: Any, origin: str) -> None:
        """Let `key` decide the setting `name`."""
        decided = from_file(SETTINGS[name], value, origin)
        self.layer[name] = Value(decided, origin)
        self.lines.append((key, f"{name}: {decided!r}"))

    def drop(self, key: str, reason: str) -> None:
        """Say that `key` decides nothing, and nothing is lost by that."""
        self.lines.append((key, f"nothing to keep: {reason}"))

    def lose(self, key: str, reason: str) -> None:
        """Say that the meaning of `key` is lost."""
        self.lines.append((key, f"NOT KEPT: {reason}"))
        self.num_lost += 1


def translate(data: Mapping[str, Any], name: str) -> Translation:
    """Translate the content of an Accelerate config file.

    Args:
        data: its keys and values.
        name: what errors call the file.

    Raises:
        ConfigError: a key that Accelerate's files do not have either, or a value that cannot be.
    """
    made = Translation()
    for key, value in data.items():
        _translate_key(made, key, value, f"file: {name} key {key}")
    decided = dict(made.layout.settings)
    asked = made.layout.strategy()
    if asked is not None:
        decided["strategy"] = asked
        made.lines.append((TOGETHER, f"strategy: {asked[0]!r}"))
    for setting, (found, key) in decided.items():
        origin = f"file: {name} key {key}"
        made.layer[setting] = Value(from_file(SETTINGS[setting], found, origin), origin)
    return made


def _translate_key(made: Translation, key: str, value: Any, origin: str) -> None:
    if key == "distributed_type":
        _translate_type(made, str(value), origin)
    elif key == "compute_environment":
        if value == "AMAZON_SAGEMAKER":
            raise ConfigError(f"{origin} is AMAZON_SAGEMAKER: {advice('sagemaker_')}")
        made.drop(key, "a launch runs on the machine that it is started on")
    elif key in LAYOUT_SECTIONS:
        _translate_layout(made, key, value, origin)
    elif key in _SECTIONS:
        _translate_section(made, key, value, origin)
    elif key in _RENAMED or key in _SAME:
        _translate_value(made, key, value, origin)
    elif key in ("command_file", "commands") or key.startswith("tpu_"):
        _translate_unknown(made, key, value, str(advice("tpu")))
    elif (text := advice(key)) is not None:
        _translate_unknown(made, key, value, text)
    else:
        hint = did_you_mean(key, [*_SAME, *_RENAMED, *_SECTIONS, *LAYOUT_SECTIONS])
        raise ConfigError(f"{key} ({origin}) is not a key of Accelerate's config files{hint or '; take it out'}")


def _entries(made: Translation, section: str, value: Any, origin: str) -> Mapping[str, Any]:
    """The keys of a section; none, and a line that says so, where it is empty."""
    if value in _NOTHING:
        made.drop(section, "empty")
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin} must hold settings, one a line, not {value!r}")
    return value


def _translate_layout(made: Translation, section: str, value: Any, origin: str) -> None:
    """Keys of the layout: what each became is told at once, and decided together when the file has been read."""
    layout = made.layout
    prefix, known, read = LAYOUT_SECTIONS[section]
    for inner, entry in _entries(made, section, value, origin).items():
        path = f"{section}.{inner}"
        name = str(inner).removeprefix(prefix)
        name = _RENAMED_OPTIONS.get(name, name)
        if inner == "gradient_accumulation_steps" and entry not in ("auto", None):
            made.take(path, inner, entry, f"{origin}.{inner}")
        elif entry in ("auto", None) or (entry in _NOTHING and isinstance(entry, (str, list, dict))):
            made.drop(path, "undecided")
        elif name not in known:
            made.lose(path, "Accelerate's files have no such key")
        else:
            first = len(layout.lines)
            read(layout, name, entry, path)
            made.lines += layout.lines[first:]
            if path in layout.refused:
                made.lose(path, layout.refused[path])


def _translate_type(made: Translation, kind: str, origin: str) -> None:
    if kind in ("FSDP", "DEEPSPEED"):
        is_fsdp = kind == "FSDP"
        (made.layout.use_shards if is_fsdp else made.layout.use_deepspeed)("distributed_type")
        told = "the model is sharded" if is_fsdp else "its engine runs the model"
        made.lines.append(("distributed_type", f"{kind}: {told}"))
        return
    said = _TYPES.get(kind, _PER_DEVICE if kind.startswith("MULTI_") else None)
    if said is None:
        text = advice(f"use_{kind.lower()}") or advice(kind.lower()) or advice("tpu")
        made.lose("distributed_type", f"{kind}: {text}")
        return
    made.drop("distributed_type", f"{kind}: {said}")
    if kind == "MULTI_CPU":
        made.take("distributed_type", "cpu", True, origin)


def _translate_section(made: Translation, key: str, value: Any, origin: str) -> None:
    for inner, entry in _entries(made, key, value, origin).items():
        path = f"{key}.{inner}"
        if inner in _COMPILER and entry is not None:
            made.take(path, inner, entry.lower() if isinstance(entry, str) else entry, f"{origin}.{inner}")
        elif entry in _NOTHING:
            made.drop(path, "off")
        else:
            made.lose(path, advice(str(inner)) or advice(f"{key.removesuffix('_config')}_") or "no counterpart here")


def _translate_value(made: Translation, key: str, value: Any, origin: str) -> None:
    name = _RENAMED.get(key, key)
    if value is None or (key == "num_processes" and value == -1):
        made.drop(key, "undecided")
    else:
        made.take(key, name, value, origin)


def _translate_unknown(made: Translation, key: str, value: Any, text: str) -> None:
    # `main` is what Accelerate writes there for everybody.
    if value in _NOTHING or (key, value) == ("main_training_function", "main") or key == "same_network":
        made.drop(key, "off" if value in _NOTHING else "it changes nothing here")
    else:
        made.lose(key, text)
