"""Settings of `headway launch`, as a frozen dataclass whose fields contain their own descriptions.

A setting's flag, help text, environment variable and config-file key are all derived from its field, so that the four
cannot drift apart. This module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from headway.common import env
from headway.core.config import mesh
from headway.core.config.string_enums import DynamoBackend

# ruff: noqa: RUF009


class Unset(Enum):
    """Type of UNSET, which marks a setting without a value. None is not used for this, because it can be a value."""

    UNSET = "unset"

    def __bool__(self) -> bool:
        """Return False, so that `value or default` works."""
        return False

    def __repr__(self) -> str:
        """Return "UNSET"."""
        return "UNSET"


UNSET: Final = Unset.UNSET

Kind = Literal["integer", "number", "text", "switch", "truth", "choice"]

T = TypeVar("T")

Maybe: TypeAlias = T | Literal[Unset.UNSET]
"""Type of a setting that may have no value."""


@dataclass(frozen=True)
class LaunchSetting:
    """Description of one field of LaunchConfig.

    Attributes:
        name: Name of the field.
        kind: "integer", "number", "text", "choice", "switch" (flag without a value) or "truth" (flag with true or
            false).
        group: Heading under which the help lists the setting.
        text: Help text.
        default: Description of the default, for the help.
        short: Alternative flag, usually with one letter, such as "-n".
        choices: Allowed values of a "choice".
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        is_for_workers: Whether the launcher passes the setting to the workers.
        is_for_files: Whether the setting may appear in a config file and in the environment.
        is_in_short_help: Whether the short help lists the setting.
        normalize: Function that returns the canonical spelling of a "text" setting, and raises ConfigError if the value
            is not allowed. None: any text is allowed.
    """

    name: str
    kind: Kind
    group: str
    text: str
    default: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int = 2**31 - 1
    is_for_workers: bool = False
    is_for_files: bool = True
    is_in_short_help: bool = False
    normalize: Callable[[str], str] | None = None

    @property
    def flag(self) -> str:
        """Flag on the command line, such as "--num_processes"."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """Name of the environment variable, such as "HEADWAY_NUM_PROCESSES"."""
        return env.PREFIX + self.name.upper()


EARLIER_NAMES = {
    "patience": "timeout",
    "machine_patience": "machine_timeout",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_activation_checkpointing_offload": "activation_checkpointing_offload",
}
"""Mapping from earlier names of settings to their current names.

Earlier names are accepted until the next release, but the help does not show them.
"""

DEFAULT_TIMEOUT = 600.0
"""Default number of seconds that a rank may be missing from a collective before the run counts as hanging."""

DEFAULT_GRACE = 300.0
"""Default number of seconds that ranks may use to save a checkpoint after the launcher has received a signal."""

PRECISIONS = ("no", "bf16", "fp16", "fp8")
"""Allowed values of `mixed_precision`."""

SHARDING_SETTINGS = tuple(
    """
    fsdp_reshard_after_forward fsdp_offload_params fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap
    fsdp_min_num_params
    """.split()  # noqa: SIM905
)
"""Settings that apply only to sharded layouts."""

DEEPSPEED_SETTINGS = tuple(
    """
    deepspeed_config_file offload_optimizer_device offload_param_device offload_optimizer_nvme_path
    offload_param_nvme_path gradient_clipping
    """.split()  # noqa: SIM905
)
"""Settings that only DeepSpeed reads."""

OFFLOAD_DEVICES = ("none", "cpu", "nvme")

CP_EXCHANGES = ("allgather", "alltoall")
"""Allowed ways to exchange keys and values in torch's ring attention."""

WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")

COMPILE_BACKENDS = tuple(name.lower() for name in DynamoBackend.list())

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_HARDWARE, _TRAINING, _MACHINES, _FAILURES, _SCRIPT = (
    "Hardware",
    "Training",
    "Several machines",
    "Failures, logs",
    "Script",
)

_LAYOUT = "Layout"

FIXED_FOR_FUNCTIONS = (_MACHINES, _SCRIPT)
"""Groups of settings that `notebook_launcher` chooses by its arguments alone."""


def _make_setting_field(
    group: str, text: str, *, takes_value: bool = False, is_for_workers: bool | None = None, **more: Any
) -> Any:
    """Return a dataclass field whose metadata contains the arguments of a `LaunchSetting`.

    Args:
        group: Heading under which the help lists the setting.
        text: Help text.
        takes_value: Whether a bool is given as "true" or "false" instead of as a flag without a value.
        is_for_workers: Whether the launcher passes the setting to the workers. None: True in the groups for training
            and for the layout, False in the other groups.
        more: Other attributes of the `LaunchSetting`.
    """
    if is_for_workers is None:
        is_for_workers = group in (_TRAINING, _LAYOUT)
    attributes = {"group": group, "text": text, "is_for_workers": is_for_workers, **more}
    return field(default=UNSET, metadata={"setting": attributes, "takes_value": takes_value})


@dataclass(frozen=True)
class LaunchConfig:
    """All settings that determine how a script is started. A setting without a value is UNSET."""

    num_processes: Maybe[int] = _make_setting_field(
        _HARDWARE,
        "Number of processes on all machines together.",
        default="one per visible accelerator; 1 per machine without any",
        short="-n",
        minimum=1,
        is_in_short_help=True,
    )
    cpu: Maybe[bool] = _make_setting_field(
        _HARDWARE, "Compute on the CPU, even if there are accelerators.", is_for_workers=True, is_in_short_help=True
    )
    multi_gpu: Maybe[bool] = _make_setting_field(_HARDWARE, "Refuse to start if there are no accelerators.")
    gpu_ids: Maybe[str] = _make_setting_field(
        _HARDWARE,
        "Accelerators of this machine to use, such as 0,1.",
        default="all visible",
        is_in_short_help=True,
    )
    num_cpu_threads_per_process: Maybe[int] = _make_setting_field(
        _HARDWARE,
        "CPU threads of each process (OMP_NUM_THREADS).",
        default="cores / processes; not set for a single process",
        minimum=1,
    )
    enable_cpu_affinity: Maybe[bool] = _make_setting_field(
        _HARDWARE, "Bind each process to the cores near its accelerator (NUMA)."
    )
    mixed_precision: Maybe[str] = _make_setting_field(
        _TRAINING,
        "Precision of the forward pass.",
        default="no",
        choices=PRECISIONS,
        is_in_short_help=True,
    )
    dynamo_backend: Maybe[str] = _make_setting_field(
        _TRAINING, "Compile models with torch.compile and this backend.", default="no", choices=COMPILE_BACKENDS
    )
    dynamo_mode: Maybe[str] = _make_setting_field(
        _TRAINING,
        "Mode of torch.compile, which decides what inductor optimizes.",
        default="default",
        choices=COMPILE_MODES,
    )
    dynamo_use_fullgraph: Maybe[bool] = _make_setting_field(
        _TRAINING, "Compile to a single graph. Code that cannot be compiled raises an error."
    )
    dynamo_use_dynamic: Maybe[bool] = _make_setting_field(
        _TRAINING, "Compile for dynamic shapes from the start.", default="dynamic only after shapes have changed"
    )
    dynamo_use_regional_compilation: Maybe[bool] = _make_setting_field(
        _TRAINING, "Compile only a model's repeated blocks, once for all of them."
    )
    gradient_accumulation_steps: Maybe[int] = _make_setting_field(
        _TRAINING, "Micro-batches per update.", default="1", minimum=1, is_in_short_help=True
    )
    activation_checkpointing: Maybe[bool] = _make_setting_field(
        _TRAINING, "Keep only the inputs of blocks; recompute the rest in backward.", is_in_short_help=True
    )
    activation_checkpointing_offload: Maybe[bool] = _make_setting_field(
        _TRAINING, "With --activation_checkpointing, keep the inputs of blocks in host memory."
    )
    strategy: Maybe[str] = _make_setting_field(
        _LAYOUT,
        "How the model is split: ddp (a replica on each process), fsdp (sharded across all), hsdp[=RANKS] (shards within groups or "
        "machines, replicas of these), tp (matrices split), or terms joined by +: fsdp+tp=2. One size may be omitted. zero1, zero2, "
        "zero3, deepspeed: with DeepSpeed.",
        default="ddp",
        is_in_short_help=True,
        normalize=mesh.normalize_strategy,
    )
    fsdp_reshard_after_forward: Maybe[bool] = _make_setting_field(
        _LAYOUT,
        "FSDP: free a block's all-gathered weights between its forward and its backward.",
        default="true",
        takes_value=True,
    )
    fsdp_offload_params: Maybe[bool] = _make_setting_field(
        _LAYOUT,
        "FSDP: keep shards, gradients and optimizer state in host memory; slow.",
        default="false",
        takes_value=True,
    )
    fsdp_auto_wrap_policy: Maybe[str] = _make_setting_field(
        _LAYOUT,
        "FSDP: units that are gathered together: blocks of the named classes, modules above a size, or the whole model.",
        default="the model's repeated blocks",
        choices=WRAP_POLICIES,
    )
    fsdp_transformer_layer_cls_to_wrap: Maybe[str] = _make_setting_field(
        _LAYOUT, "FSDP: class names of the blocks to gather as units, separated by commas."
    )
    fsdp_min_num_params: Maybe[int] = _make_setting_field(
        _LAYOUT,
        "FSDP: minimum number of parameters of a module that is gathered as its own unit.",
        minimum=1,
        maximum=2**62,
    )
    cp_comm_strategy: Maybe[str] = _make_setting_field(
        _LAYOUT,
        "Context parallelism: how ranks exchange keys and values in torch's ring attention.",
        default="allgather",
        choices=CP_EXCHANGES,
    )
    deepspeed_config_file: Maybe[str] = _make_setting_field(_LAYOUT, "DeepSpeed: path of its JSON configuration.")
    offload_optimizer_device: Maybe[str] = _make_setting_field(
        _LAYOUT,
        "DeepSpeed: device for the optimizer state.",
        default="none: on the accelerator",
        choices=OFFLOAD_DEVICES,
    )
    offload_param_device: Maybe[str] = _make_setting_field(
        _LAYOUT,
        "DeepSpeed, zero3: device for the parameters.",
        default="none: on the accelerator",
        choices=OFFLOAD_DEVICES,
    )
    offload_optimizer_nvme_path: Maybe[str] = _make_setting_field(_LAYOUT, "DeepSpeed: folder for nvme offloading.")
    offload_param_nvme_path: Maybe[str] = _make_setting_field(_LAYOUT, "DeepSpeed: folder for nvme offloading.")
    gradient_clipping: Maybe[float] = _make_setting_field(
        _LAYOUT, "DeepSpeed: maximum norm of the gradients. With other layouts, call clip_grad_norm_.", minimum=0
    )
    num_machines: Maybe[int] = _make_setting_field(
        _MACHINES, "Number of machines in this run.", default="1", minimum=1, is_in_short_help=True
    )
    min_machines: Maybe[int] = _make_setting_field(
        _MACHINES,
        "Smallest number of machines with which the run continues after it has lost others (never machine 0); needs --max_restarts.",
        default="all of them",
        minimum=1,
    )
    machine_rank: Maybe[int] = _make_setting_field(
        _MACHINES, "Rank of this machine, from 0.", default="print the command for each machine", minimum=0
    )
    main_process_ip: Maybe[str] = _make_setting_field(_MACHINES, "Address at which the other machines reach machine 0.")
    main_process_port: Maybe[int] = _make_setting_field(
        _MACHINES,
        "Port on machine 0 for the rendezvous.",
        default="on one machine, a free port that the launcher binds",
        minimum=0,
        maximum=65535,
    )
    rdzv_backend: Maybe[str] = _make_setting_field(
        _MACHINES,
        "Rendezvous backend: static (ranks of machines are given) or c10d (torch assigns them).",
        default="static; c10d with --max_restarts",
        choices=("static", "c10d"),
    )
    rdzv_conf: Maybe[str] = _make_setting_field(
        _MACHINES, "Further rendezvous options, as key=value,key=value. timeout=60 waits 60 s for all machines."
    )
    rdzv_id: Maybe[str] = _make_setting_field(_MACHINES, "ID of the run, if several runs share one rendezvous.")
    secret: Maybe[str] = _make_setting_field(
        _MACHINES,
        "File with the secret that authenticates the machines: at least 16 bytes, equal on all of them. "
        "HEADWAY_SECRET can contain the secret instead.",
        is_for_files=False,
    )
    max_restarts: Maybe[int] = _make_setting_field(
        _FAILURES,
        "Number of times that all processes are restarted after a failure.",
        default="0",
        minimum=0,
        is_in_short_help=True,
    )
    timeout: Maybe[float] = _make_setting_field(
        _FAILURES,
        "Seconds that ranks wait for another rank, and machines for another machine at the start. 0: no limit.",
        default="600",
        minimum=0,
        is_for_workers=True,
    )
    monitor_interval: Maybe[float] = _make_setting_field(
        _FAILURES, "Seconds between two checks of the processes.", default="0.1", minimum=0
    )
    machine_timeout: Maybe[float] = _make_setting_field(
        _FAILURES, "Seconds without a heartbeat after which another machine counts as lost.", default="30", minimum=3
    )
    grace: Maybe[float] = _make_setting_field(
        _FAILURES,
        "Seconds that ranks have to save a checkpoint after the launcher has received SIGTERM or SIGUSR1.",
        default="300",
        minimum=1,
    )
    log_dir: Maybe[str] = _make_setting_field(
        _FAILURES, "Folder for one log file per rank and failure.json.", is_in_short_help=True
    )
    tee: Maybe[str] = _make_setting_field(
        _FAILURES,
        "Contents of the log files: 0 nothing, 1 stdout, 2 stderr, 3 both.",
        default="3 with --log_dir",
        short="-t",
        choices=("0", "1", "2", "3"),
    )
    metrics_port: Maybe[int] = _make_setting_field(
        _FAILURES, "Port on 127.0.0.1 at which Prometheus can read updates, loss, speed and memory.", minimum=1
    )
    role: Maybe[str] = _make_setting_field(
        _FAILURES, "Word before the rank in the prefix of output lines, as in [rank 0].", default="rank"
    )
    debug: Maybe[bool] = _make_setting_field(
        _FAILURES, "Let torch check every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL). Slow."
    )
    quiet: Maybe[bool] = _make_setting_field(_FAILURES, "Do not print the banner.", short="-q")
    module: Maybe[bool] = _make_setting_field(
        _SCRIPT, "SCRIPT is a module, as in python -m.", short="-m", is_for_files=False, is_in_short_help=True
    )
    no_python: Maybe[bool] = _make_setting_field(
        _SCRIPT, "SCRIPT is an executable program, not a Python file.", is_for_files=False
    )
    run_as: Maybe[str] = _make_setting_field(
        _SCRIPT,
        "Let Headway serve `import accelerate` in SCRIPT and its libraries.",
        default="the installed Accelerate",
        short="--as",
        choices=("accelerate",),
    )

    def is_set(self, name: str) -> bool:
        """Whether the setting `name` has been set."""
        return getattr(self, name) is not UNSET


_KINDS: dict[type, Kind] = {int: "integer", float: "number", bool: "switch", str: "text"}


def _describe_field(name: str, annotation: Any, metadata: Mapping[str, Any]) -> LaunchSetting:
    """Return the `LaunchSetting` that describes a field.

    Args:
        name: Name of the field.
        annotation: Type annotation of the field, such as `Maybe[int]`, from which the kind is derived.
        metadata: Metadata of the field, from `_make_setting_field`.
    """
    value_type, *_ = get_args(annotation)
    kind = _KINDS[value_type]
    if "choices" in metadata["setting"]:
        kind = "choice"
    elif metadata["takes_value"]:
        kind = "truth"
    return LaunchSetting(name, kind, **metadata["setting"])


SETTINGS: Mapping[str, LaunchSetting] = {
    each.name: _describe_field(each.name, each.type, each.metadata) for each in fields(LaunchConfig)
}
"""All settings by name, in the order of the help."""
