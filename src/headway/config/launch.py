"""What `headway launch` can be told: a frozen dataclass, and a table that describes each of its settings.

The table is the single source of a setting's flag, help, environment variable and key in the config file, so
that the four cannot drift apart.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias, TypeVar

from headway import env
from headway.config import outside
from headway.config.spelled import DynamoBackend


class Unset(Enum):
    """The type of UNSET, which says that nobody has decided a setting yet (None may be a decision)."""

    UNSET = "unset"

    def __bool__(self) -> bool:
        """False, so that `value or default` reads as it should."""
        return False

    def __repr__(self) -> str:
        """Its name."""
        return "UNSET"


UNSET: Final = Unset.UNSET
T = TypeVar("T")
Maybe: TypeAlias = T | Literal[Unset.UNSET]


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that decides how a script is started; what nobody decided is UNSET. SETTINGS says what each means."""

    num_processes: Maybe[int] = UNSET
    cpu: Maybe[bool] = UNSET
    multi_gpu: Maybe[bool] = UNSET
    gpu_ids: Maybe[str] = UNSET
    num_cpu_threads_per_process: Maybe[int] = UNSET
    enable_cpu_affinity: Maybe[bool] = UNSET

    mixed_precision: Maybe[str] = UNSET
    dynamo_backend: Maybe[str] = UNSET
    dynamo_mode: Maybe[str] = UNSET
    dynamo_use_fullgraph: Maybe[bool] = UNSET
    dynamo_use_dynamic: Maybe[bool] = UNSET
    dynamo_use_regional_compilation: Maybe[bool] = UNSET
    gradient_accumulation_steps: Maybe[int] = UNSET

    strategy: Maybe[str] = UNSET
    fsdp_reshard_after_forward: Maybe[bool] = UNSET
    fsdp_offload_params: Maybe[bool] = UNSET
    fsdp_auto_wrap_policy: Maybe[str] = UNSET
    fsdp_transformer_layer_cls_to_wrap: Maybe[str] = UNSET
    fsdp_min_num_params: Maybe[int] = UNSET
    fsdp_activation_checkpointing: Maybe[bool] = UNSET
    fsdp_activation_checkpointing_offload: Maybe[bool] = UNSET
    cp_comm_strategy: Maybe[str] = UNSET
    deepspeed_config_file: Maybe[str] = UNSET
    offload_optimizer_device: Maybe[str] = UNSET
    offload_param_device: Maybe[str] = UNSET
    offload_optimizer_nvme_path: Maybe[str] = UNSET
    offload_param_nvme_path: Maybe[str] = UNSET
    gradient_clipping: Maybe[float] = UNSET

    num_machines: Maybe[int] = UNSET
    min_machines: Maybe[int] = UNSET
    machine_rank: Maybe[int] = UNSET
    main_process_ip: Maybe[str] = UNSET
    main_process_port: Maybe[int] = UNSET
    rdzv_backend: Maybe[str] = UNSET
    rdzv_conf: Maybe[str] = UNSET
    rdzv_id: Maybe[str] = UNSET
    secret: Maybe[str] = UNSET

    max_restarts: Maybe[int] = UNSET
    patience: Maybe[float] = UNSET
    monitor_interval: Maybe[float] = UNSET
    machine_patience: Maybe[float] = UNSET
    grace: Maybe[float] = UNSET
    log_dir: Maybe[str] = UNSET
    tee: Maybe[str] = UNSET
    role: Maybe[str] = UNSET
    debug: Maybe[bool] = UNSET
    quiet: Maybe[bool] = UNSET

    module: Maybe[bool] = UNSET
    no_python: Maybe[bool] = UNSET
    run_as: Maybe[str] = UNSET

    def is_set(self, name: str) -> bool:
        """Has somebody decided the setting `name`?"""
        return getattr(self, name) is not UNSET


@dataclass(frozen=True)
class Setting:
    """What is known about one field of LaunchConfig.

    Attributes:
        name: the field.
        kind: "integer", "number", "text", "switch" (a flag alone), "truth" (a flag with true or false) or "choice".
        group: the heading it stands under in the help.
        text: its help.
        default: what happens where nobody decides, in words.
        short: its one-letter flag.
        choices: what a "choice" may be.
        minimum: the smallest number allowed.
        maximum: the largest.
        is_for_workers: do workers read it (and so find it in the payload)?
        is_for_files: may it stand in a config file and in the environment?
        read: reads a "text" further, and raises ConfigError where it cannot be.
    """

    name: str
    kind: Literal["integer", "number", "text", "switch", "truth", "choice"]
    group: str
    text: str
    default: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int = 2**31 - 1
    is_for_workers: bool = False
    is_for_files: bool = True
    read: Callable[[str], str] | None = None

    @property
    def flag(self) -> str:
        """Its long flag."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return env.PREFIX + self.name.upper()


DEFAULT_PATIENCE = 600.0
"""Seconds that a rank may keep the others waiting, where nobody says."""

DEFAULT_GRACE = 300.0
"""Seconds that ranks get to save in after a signal to the launcher, where nobody says."""

PRECISIONS = ("no", "bf16", "fp16", "fp8")
OF_SHARDS = (
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
)
"""Settings that have no meaning in a layout without shards."""
OF_DEEPSPEED = (
    "deepspeed_config_file",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_clipping",
)
"""Settings that only DeepSpeed's engine reads."""
OFFLOADS = ("none", "cpu", "nvme")
ROTATIONS = ("allgather", "alltoall")
"""How keys and values travel under context parallelism."""
WRAPPING = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
BACKENDS = tuple(name.lower() for name in DynamoBackend.list())
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_HARDWARE, _TRAINING, _MACHINES, _CARE, _SCRIPT = "Hardware", "Training", "Several machines", "Failures, logs", "Script"
_LAYOUT = "Layout"


_TABLE = (
    Setting(
        "num_processes",
        "integer",
        _HARDWARE,
        "Processes to start, over all machines.",
        short="-n",
        minimum=1,
        default="one per visible accelerator; 1 per machine without any",
    ),
    Setting("cpu", "switch", _HARDWARE, "Compute on the CPU even where there are accelerators.", is_for_workers=True),
    Setting("multi_gpu", "switch", _HARDWARE, "Insist on accelerators: refuse to start where there are none."),
    Setting("gpu_ids", "text", _HARDWARE, "Accelerators of this machine to use, such as 0,1.", default="all visible"),
    Setting(
        "num_cpu_threads_per_process",
        "integer",
        _HARDWARE,
        "CPU threads of each process (OMP_NUM_THREADS).",
        minimum=1,
        default="cores / processes; one process is left alone",
    ),
    Setting("enable_cpu_affinity", "switch", _HARDWARE, "Bind each process to the cores near its accelerator (NUMA)."),
    Setting(
        "mixed_precision",
        "choice",
        _TRAINING,
        "Precision of the forward pass.",
        choices=PRECISIONS,
        default="no",
        is_for_workers=True,
    ),
    Setting(
        "dynamo_backend",
        "choice",
        _TRAINING,
        "Compile models with torch.compile and this backend.",
        choices=BACKENDS,
        default="no",
        is_for_workers=True,
    ),
    Setting(
        "dynamo_mode",
        "choice",
        _TRAINING,
        "What inductor optimises for.",
        choices=MODES,
        default="default",
        is_for_workers=True,
    ),
    Setting(
        "dynamo_use_fullgraph",
        "switch",
        _TRAINING,
        "Compile to a single graph: code that cannot be compiled is an error.",
        is_for_workers=True,
    ),
    Setting(
        "dynamo_use_dynamic",
        "switch",
        _TRAINING,
        "Compile for all sizes from the start.",
        default="for the sizes that occur",
        is_for_workers=True,
    ),
    Setting(
        "dynamo_use_regional_compilation",
        "switch",
        _TRAINING,
        "Compile only a model's repeated blocks, once for all of them.",
        is_for_workers=True,
    ),
    Setting(
        "gradient_accumulation_steps",
        "integer",
        _TRAINING,
        "Micro-batches per update.",
        minimum=1,
        default="1",
        is_for_workers=True,
    ),
    Setting(
        "strategy",
        "text",
        _LAYOUT,
        "How the model is split: ddp (a replica on each process), fsdp (sharded across all), hsdp[=RANKS] (shards within groups or "
        "machines, replicas of these), tp (matrices split), or terms joined by +: fsdp+tp=2. One size may be omitted. zero1, zero2, "
        "zero3, deepspeed: with DeepSpeed.",
        default="ddp",
        is_for_workers=True,
        read=outside.spelled,
    ),
    Setting(
        "fsdp_reshard_after_forward",
        "truth",
        _LAYOUT,
        "FSDP: free a block's gathered weights between its forward and its backward.",
        default="true",
        is_for_workers=True,
    ),
    Setting(
        "fsdp_offload_params",
        "truth",
        _LAYOUT,
        "FSDP: keep shards, gradients and optimizer state in host memory; slow.",
        default="false",
        is_for_workers=True,
    ),
    Setting(
        "fsdp_auto_wrap_policy",
        "choice",
        _LAYOUT,
        "FSDP: what is gathered together: blocks of named classes, modules above a size, or the whole model.",
        choices=WRAPPING,
        default="the model's repeated blocks",
        is_for_workers=True,
    ),
    Setting(
        "fsdp_transformer_layer_cls_to_wrap",
        "text",
        _LAYOUT,
        "FSDP: class names of these blocks, separated by commas.",
        is_for_workers=True,
    ),
    Setting(
        "fsdp_min_num_params",
        "integer",
        _LAYOUT,
        "FSDP: number of parameters from which a module is gathered on its own.",
        minimum=1,
        maximum=2**62,
        is_for_workers=True,
    ),
    Setting(
        "fsdp_activation_checkpointing",
        "truth",
        _LAYOUT,
        "Recompute the activations of repeated blocks in backward.",
        default="false",
        is_for_workers=True,
    ),
    Setting(
        "fsdp_activation_checkpointing_offload",
        "truth",
        _LAYOUT,
        "Also keep the inputs of these blocks in host memory.",
        default="false",
        is_for_workers=True,
    ),
    Setting(
        "cp_comm_strategy",
        "choice",
        _LAYOUT,
        "Context parallelism: how keys and values travel in torch's ring attention.",
        choices=ROTATIONS,
        default="allgather",
        is_for_workers=True,
    ),
    Setting(
        "deepspeed_config_file", "text", _LAYOUT, "DeepSpeed: path of its JSON configuration.", is_for_workers=True
    ),
    Setting(
        "offload_optimizer_device",
        "choice",
        _LAYOUT,
        "DeepSpeed: where to keep the optimizer state.",
        choices=OFFLOADS,
        default="none: with the weights",
        is_for_workers=True,
    ),
    Setting(
        "offload_param_device",
        "choice",
        _LAYOUT,
        "DeepSpeed, zero3: where to keep the parameters.",
        choices=OFFLOADS,
        default="none: on the accelerator",
        is_for_workers=True,
    ),
    Setting(
        "offload_optimizer_nvme_path", "text", _LAYOUT, "DeepSpeed: folder for nvme offloading.", is_for_workers=True
    ),
    Setting("offload_param_nvme_path", "text", _LAYOUT, "DeepSpeed: folder for nvme offloading.", is_for_workers=True),
    Setting(
        "gradient_clipping",
        "number",
        _LAYOUT,
        "DeepSpeed: maximum norm of the gradients. With other layouts, call clip_grad_norm_.",
        minimum=0,
        is_for_workers=True,
    ),
    Setting("num_machines", "integer", _MACHINES, "Machines in this run.", minimum=1, default="1"),
    Setting(
        "min_machines",
        "integer",
        _MACHINES,
        "With how many the run goes on after machines are lost (not machine 0); needs --max_restarts.",
        minimum=1,
        default="all of them",
    ),
    Setting(
        "machine_rank",
        "integer",
        _MACHINES,
        "Which of them this one is, from 0.",
        minimum=0,
        default="the command for each machine is printed",
    ),
    Setting("main_process_ip", "text", _MACHINES, "Address of machine 0, as the others reach it."),
    Setting(
        "main_process_port",
        "integer",
        _MACHINES,
        "Port of machine 0 where the machines meet.",
        minimum=0,
        maximum=65535,
        default="on one machine a free one that the launcher binds",
    ),
    Setting(
        "rdzv_backend",
        "choice",
        _MACHINES,
        "How machines meet: by their given ranks, or as they come.",
        choices=("static", "c10d"),
        default="static; c10d with --max_restarts",
    ),
    Setting(
        "rdzv_conf",
        "text",
        _MACHINES,
        "More rendezvous options, key=value,key=value: timeout=60 gives machines 60 s to come.",
    ),
    Setting("rdzv_id", "text", _MACHINES, "Name of the run, where several share one rendezvous."),
    Setting(
        "secret",
        "text",
        _MACHINES,
        "File with 16 bytes or more, alike on all machines, by which they know one another. HEADWAY_SECRET may hold them instead.",
        is_for_files=False,
    ),
    Setting(
        "max_restarts",
        "integer",
        _CARE,
        "How often all processes are started again after a failure.",
        minimum=0,
        default="0",
    ),
    Setting(
        "patience",
        "number",
        _CARE,
        "Seconds that a rank, or a machine at the start, may keep the others waiting; 0: forever.",
        minimum=0,
        default="600",
        is_for_workers=True,
    ),
    Setting("monitor_interval", "number", _CARE, "Seconds between looks at the processes.", minimum=0, default="0.1"),
    Setting(
        "machine_patience",
        "number",
        _CARE,
        "Seconds of silence after which another machine counts as lost.",
        minimum=3,
        default="30",
    ),
    Setting(
        "grace",
        "number",
        _CARE,
        "Seconds that ranks get to save in after SIGTERM or SIGUSR1 to the launcher.",
        minimum=1,
        default="300",
    ),
    Setting("log_dir", "text", _CARE, "Folder for one log file per rank and failure.json."),
    Setting(
        "tee",
        "choice",
        _CARE,
        "What the log files hold: 0 nothing, 1 stdout, 2 stderr, 3 both.",
        short="-t",
        choices=("0", "1", "2", "3"),
        default="3 with --log_dir",
    ),
    Setting("role", "text", _CARE, "Word before the process number in line prefixes: [rank 0].", default="rank"),
    Setting("debug", "switch", _CARE, "Let torch check every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL); slow."),
    Setting("quiet", "switch", _CARE, "Leave the banner out.", short="-q"),
    Setting("module", "switch", _SCRIPT, "SCRIPT is a module, as in python -m.", short="-m", is_for_files=False),
    Setting("no_python", "switch", _SCRIPT, "SCRIPT is a program of its own, not Python.", is_for_files=False),
    Setting(
        "run_as",
        "choice",
        _SCRIPT,
        "What `import accelerate` gives to SCRIPT and its libraries: Headway.",
        short="--as",
        choices=("accelerate",),
        default="what is installed",
    ),
)

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
"""Every setting by name, in the order of the help."""
