"""Types of the JSON entries that `RunRecorder` writes about a run, with the meaning of each key. Imports no torch.

Each rank writes three files, which `RunRecord` reads: `facts<rank>.json` contains one `RunFacts`, `rank<rank>.jsonl` one
`UpdateRecord` per line, and `trace<rank>.jsonl` one `LossEntry` per line. The other types are parts of these.

A line of the script is a text such as "train.py:12 in main".
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, final

SampleKey = Literal["row_hashes", "unpadded_hashes", "indices"]
"""Key of `BatchEntry` by which samples are recognized."""
MOST_SUMMED = 1 << 16
"""Largest number of values of a row, or of a group of rows, from which a sum is computed.

Of a longer row, values at regular intervals are summed. The limit must not be one for the whole tensor: a row of the
whole batch would then be sampled at other positions than the same row of a part of the batch, which has fewer rows.
"""


@final
class BatchEntry(TypedDict, total=False):
    """Batch that one rank has trained on.

    Attributes:
        loader: Index among the prepared loaders; -1 if the batch comes from no prepared loader. Such an entry has only
            `loader`, `num_rows`, `row_hashes` and `unpadded_hashes`.
        position: Number of batches that the current pass over the loader has returned before this one.
        epoch: Number of complete passes over the loader before the current one.
        num_rows: Number of rows on this rank; None if the batch has no tensor with rows.
        valid_counts: Number of rows on each data shard that are not repetitions made to fill the last batch. None if
            all rows count.
        row_hashes: Hash of each row of this rank. Absent if the batch has no rows.
        unpadded_hashes: Hash of each row without its padding. Absent if the batch has no rows.
        indices: Dataset index of each row of this rank; empty if unknown.
        wait_seconds: Time for which the script waited for the batch.
        cpu_seconds: CPU time of the main thread for fetching the batch.
        advanced_generators: Libraries whose global random number generators changed during the fetch: "torch",
            "random", "numpy".
    """

    loader: int
    position: int
    epoch: int
    num_rows: int | None
    valid_counts: list[int] | None
    row_hashes: list[str]
    unpadded_hashes: list[str]
    indices: list[int]
    wait_seconds: float
    cpu_seconds: float
    advanced_generators: list[str]


@dataclass(kw_only=True)
class CallEntry:
    """Torch call behind a loss, or a tensor that no recorded call has made. `CallTrace` writes these entries.

    Attributes:
        line: Line of the script that makes the call or uses the tensor.
        func: Name of the function; "input" for a tensor that no recorded call has made.
        inputs: For each tensor argument, the index in `LossEntry.calls` of the earlier call that made it.
        shape: Shape of the result; for a nested tensor, only its number of items. If there are several results, only
            the first one is recorded.
        row_sums: Three sums for each row of the result: of the values, of their absolute values, and of the values
            weighted by position. A result with many rows has sums of groups of rows instead, as many as the batch has
            rows. Empty for parameters, and for sharded, sparse, quantized, nested and meta tensors.
        is_sampled: Whether `row_sums` are sums of only some of the values.
        is_cut: Whether the result has no autograd graph, although an argument requires a gradient.
        numbers: Numbers among the arguments.
        number_names: Script's expression for each item of `numbers`, such as "self.mean"; "" if unknown. Empty if all
            are unknown.
        strings: Keyword arguments that are strings, such as the reduction.
        has_class_weights: Whether class weights are passed to a loss function.
        num_labels: Number of integer labels of a loss function that are not ignored. None if there are none.
        ignores_labels: Whether a loss function ignores any of its integer labels.
        predicted_input: Index of the call that made a model input, if the target of a loss function is this input
            shifted by one step. Otherwise None.
        module_name: Name of the innermost running module in its prepared model; "" if it has no known weight.
        model_tensor: For an input, the name of the prepared model's parameter or buffer; "" for another tensor.
        variable: For an input that is in no prepared model, a description such as "keeper.rows" or "weight of a
            Linear"; "" if unknown.
    """

    line: str
    func: str
    shape: list[int]
    inputs: list[int] = field(default_factory=list)
    row_sums: list[list[float]] = field(default_factory=list)
    is_sampled: bool = False
    is_cut: bool = False
    numbers: list[float] = field(default_factory=list)
    number_names: list[str] = field(default_factory=list)
    strings: dict[str, str] = field(default_factory=dict)
    has_class_weights: bool = False
    num_labels: int | None = None
    ignores_labels: bool = False
    predicted_input: int | None = None
    module_name: str = ""
    model_tensor: str = ""
    variable: str = ""

    @property
    def is_input(self) -> bool:
        """Whether this is a tensor that no recorded call has made."""
        return self.func == "input"


@dataclass(kw_only=True)
class LossEntry:
    """Loss of a backward pass on one rank, with the torch calls that computed it. `CallTrace` writes these entries.

    Attributes:
        update: Number of the update, from 1.
        loss_call: Index in `calls` of the call that returned the loss; -1 if unknown.
        value: Value of the loss; the mean if it is not a scalar.
        weight: Loss weight that the script passed to `backward`, or None.
        reduction: "mean" or "sum", as the script passed it to `backward`.
        line: Line of the script that called `backward`.
        calls: Torch calls in order.
    """

    update: int
    loss_call: int
    value: float
    weight: float | None
    reduction: str
    line: str
    calls: list[CallEntry]

    def to_json(self) -> str:
        """Return the entry as one line of JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "LossEntry":
        """Return an entry from the parsed JSON of `to_json`."""
        return cls(**{**fields, "calls": [CallEntry(**call) for call in fields["calls"]]})


@final
class CheckpointEntry(TypedDict):
    """Checkpoint that the script has saved or loaded.

    Attributes:
        update: Number of updates that were made before the checkpoint was saved.
        folder: Folder that the script passed, or the folder of all checkpoints; "" if it passed none.
    """

    update: int
    folder: str


@final
class LoaderEntry(TypedDict):
    """Prepared loader.

    Attributes:
        dataset: Class name of the dataset.
        length: Number of samples in the dataset; -1 if unknown.
        batch_size: Number of samples per batch on all ranks together, or None.
        workers: Number of worker processes.
        line: Line of the script that created the loader; "" if unknown.
        is_stream: Whether the dataset is an `IterableDataset`.
        has_state: Whether the dataset has a `state_dict` method.
        generators: Names of the dataset's attributes that are random number generators, such as "Crops.generator".
    """

    dataset: str
    length: int
    batch_size: int | None
    workers: int
    line: str
    is_stream: bool
    has_state: bool
    generators: list[str]


@final
class OptimizerFacts(TypedDict):
    """Prepared optimizer.

    Attributes:
        type: Class name of the optimizer.
        line: Line of the script that created it; "" if unknown.
    """

    type: str
    line: str


@final
class MetricEntry(TypedDict):
    """Value that the script has passed to a prepared scheduler's `step`, such as a loss for `ReduceLROnPlateau`.

    Attributes:
        update: Number of updates made before.
        value: The value.
        line: Line of the script that called `step`.
    """

    update: int
    value: float
    line: str


@final
class LeakEntry(TypedDict):
    """Result of one test of the model for leaks, that is, for outputs that depend on unrelated parts of a batch.

    Attributes:
        kind: Part of the batch: other "rows", other "documents" of a packed row, "padding", or the tokens of the
            "future". Also "copy" if the loss compares outputs with tokens that the model has seen, and "steps" if an
            input contains a statistic over later steps of a time series.
        is_leak: Whether the model leaks.
        description: Description of the leak, with the first torch call that leaks; "" if there is no leak.
        call: This torch call, such as "softmax() at train.py:12"; "" if unknown.
    """

    kind: str
    is_leak: bool
    description: str
    call: str


@final
class AliveTensorsEntry(TypedDict):
    """Tensors of earlier updates that were still alive after the last update, and that one line of the script has made.

    Attributes:
        line: Line of the script.
        updates: Numbers of the updates in which the tensors were made.
        tensor_bytes: Memory of the tensors without an autograd graph.
        graph_bytes: Memory of the tensors with an autograd graph, and of all tensors that their graphs keep.
    """

    line: str
    updates: list[int]
    tensor_bytes: int
    graph_bytes: int


@final
class SlowFunctionEntry(TypedDict):
    """Function of the script that was often running while the main process fetched batches.

    Attributes:
        num_samples: Number of stack samples in which the function was running.
        task: Task of the loader in which it ran: "collate", or "item" for reading a sample.
        function: Function and its first line.
    """

    num_samples: int
    task: str
    function: str


@dataclass(kw_only=True)
class UpdateRecord:
    """Record of one update on one rank. An update is one optimizer step, with all batches that it uses.

    Attributes:
        number: Number of the update in the run, from 1; 0 before the update has ended.
        batches: Batches from which the update was computed.
        losses: Value of each loss, in order.
        learning_rates: Learning rate of each parameter group of all prepared optimizers, in order.

        gradient_norms: Norm of each parameter's gradient, as the optimizer received it, by parameter name.
        parameter_hashes: Hash of each parameter's value after the update, by parameter name.
        buffer_hashes: Hash of each buffer's value after the update, by buffer name.
        unprepared_hashes: Hash of the parameters of each model that was not passed to `prepare`, by a description of
            the model, such as "Teacher, created at train.py:9".
        idle_experts: Indices of the experts without gradient, by the name of the parameter that contains all experts.
        frozen_with_gradient: Names of the frozen parameters that had a gradient at each optimizer step of the update.
        training_modes: Modes ("train", "eval") in which a model was called with gradients, by the index of the prepared
            model as text; "-1" is a model that was not prepared.

        write_lines: Lines of the script that changed a parameter or buffer in place, by the name of the tensor.
        unprepared_write_lines: Lines of the script that changed a model that was not passed to `prepare`, by a
            description of the model.
        gradient_lines: For each line of the script that changed gradients, how many backward passes of the update had
            run before each change.
        rate_lines: Lines of the script that set a learning rate.
        discard_lines: Lines of the script that cleared gradients of a batch before an optimizer step used them. A line
            occurs once for each batch.

        seconds: Duration of the update, in seconds.
        cpu_seconds: CPU time that the main thread spent on the update, in seconds.
        peak_bytes: Peak memory from the start of the process: bytes allocated on the GPU, or, on a CPU, the resident
            memory of the process.
        resident_bytes: Memory in use after the update, measured like `peak_bytes`.
    """

    number: int = 0
    batches: list[BatchEntry] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)

    gradient_norms: dict[str, float] = field(default_factory=dict)
    parameter_hashes: dict[str, str] = field(default_factory=dict)
    buffer_hashes: dict[str, str] = field(default_factory=dict)
    unprepared_hashes: dict[str, str] = field(default_factory=dict)
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    frozen_with_gradient: list[str] = field(default_factory=list)
    training_modes: dict[str, list[str]] = field(default_factory=dict)

    write_lines: dict[str, list[str]] = field(default_factory=dict)
    unprepared_write_lines: dict[str, list[str]] = field(default_factory=dict)
    gradient_lines: dict[str, list[int]] = field(default_factory=dict)
    rate_lines: list[str] = field(default_factory=list)
    discard_lines: list[str] = field(default_factory=list)

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    resident_bytes: int = 0


@dataclass(kw_only=True)
class SourceFacts:
    """Lines of the script that read values that can differ between runs. Each dict has lines as keys.

    Attributes:
        clock_lines: Function that reads the clock or creates a UUID, such as "time.time".
        unseeded_lines: Generator that was created without a seed.
        global_draw_lines: Function that draws from the global generator of Python or NumPy, such as "random.shuffle".
        seed_lines: Seed that was passed to `random.seed`, directly or through `set_seed`, as text.
        eval_lines: "eval" for each line that put a module into evaluation mode.
        suspects: Calls that were only found in the source, by kind: "unseeded" (generators without a seed) and
            "outside" (values such as the time or a process ID). The inner dicts have lines without functions as keys.
    """

    clock_lines: dict[str, str] = field(default_factory=dict)
    unseeded_lines: dict[str, str] = field(default_factory=dict)
    global_draw_lines: dict[str, str] = field(default_factory=dict)
    seed_lines: dict[str, str] = field(default_factory=dict)
    eval_lines: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(kw_only=True)
class RunFacts(SourceFacts):
    """What one rank has recorded about a run as a whole. Fields have their defaults until they are recorded.

    Attributes:
        rank: Global rank of the process.
        data_shard_index: Index of the rank's data shard. Ranks with equal indices train on equal samples.
        strategy: Name of the layout, such as "fsdp".
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        replays_batches: Whether a batch is run again in micro-batches after an out-of-memory error.
        uses_accelerate_rules: Whether the script uses Accelerate's API, whose loaders shuffle in another order on each
            number of processes.
        uses_compilation: Whether the script has called `torch.compile`.
        end_reason: Reason for the end of the process: "enough" (after the last requested update), "too slow", or
            "ended" (by the script).

        num_backwards: Number of backward passes.
        saves: Checkpoints that the script has saved.
        loads: Checkpoints that the script has loaded.

        trainable_parameters: Names of the parameters that required gradients before the first update.
        frozen_parameters: Names of the other parameters. Those of bitsandbytes are left out.
        optimized_parameters: Names of the parameters that belong to a prepared optimizer. None before training began.
        trainable_dtypes: Names of the dtypes of all trainable parameters, such as "float32".
        initial_hashes: Hashes of values before the first update, by parameter name and by "buffer:NAME".
        batch_norms: Names of the BatchNorm modules that are not synchronized between ranks.
        num_dropout_rates: Number of nonzero dropout rates among the attributes of all modules.
        optimizers: Prepared optimizers, in order.
        lost_optimizer_state: Whether optimizers had fewer parameters with state at an update than after the resume
            before it.
        scheduler_metrics: Values that were passed to prepared schedulers, in order.

        loaders: Prepared loaders, by number as text.
        changed_dataset_tensors: Names of the dataset's tensors that were changed in place during a fetch, by loader
            number as text.
        indivisible_batch_size: Batch size of a loader that could not be divided by the number of data shards.
        slow_functions: Functions that took most of the time of fetches, most frequent first.

        generator_hashes: Hashes of the states that the global generators "torch", "random" and "numpy" had when
            training began.
        draw_lines: Torch functions that drew random numbers from the global generator in the training loop, by line.
        unshared_draw_lines: Entries of `draw_lines` whose draws could not be made for the global batch.
        num_dropout_calls: Number of calls with active dropout.
        reversed_listing_lines: Lines that got the files of a folder in reverse order.

        write_lines: Lines that changed a parameter or buffer in place since the last recorded update, by tensor name.
        escaped_files: Files that the script changed outside of the scratch folder.
        failed_backward: Number of the backward pass in which an out-of-memory error was injected; 0 if none was.

        leak_entries: Results of the tests for leaks. None if the model was not tested.
        probe_error: Error that ended the tests for leaks.
        buffers_changed_by_eval: Names of the persistent buffers that a call in evaluation mode changes.

        tensor_peak_bytes: Peak memory of tensors, in bytes. None in a run that does not measure it.
        alive_tensors: Tensors of earlier updates that were alive after the last update, by line.
    """

    rank: int = 0
    data_shard_index: int = 0
    strategy: str = ""
    mixed_precision: str = "no"
    replays_batches: bool = False
    uses_accelerate_rules: bool = False
    uses_compilation: bool = False
    end_reason: str = ""

    num_backwards: int = 0
    saves: list[CheckpointEntry] = field(default_factory=list)
    loads: list[CheckpointEntry] = field(default_factory=list)

    trainable_parameters: list[str] = field(default_factory=list)
    frozen_parameters: list[str] = field(default_factory=list)
    optimized_parameters: list[str] | None = None
    trainable_dtypes: list[str] = field(default_factory=list)
    initial_hashes: dict[str, str] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    num_dropout_rates: int = 0
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    lost_optimizer_state: bool = False
    scheduler_metrics: list[MetricEntry] = field(default_factory=list)

    loaders: dict[str, LoaderEntry] = field(default_factory=dict)
    changed_dataset_tensors: dict[str, list[str]] = field(default_factory=dict)
    indivisible_batch_size: int = 0
    slow_functions: list[SlowFunctionEntry] = field(default_factory=list)

    generator_hashes: dict[str, str] = field(default_factory=dict)
    draw_lines: dict[str, str] = field(default_factory=dict)
    unshared_draw_lines: dict[str, str] = field(default_factory=dict)
    num_dropout_calls: int = 0
    reversed_listing_lines: list[str] = field(default_factory=list)

    write_lines: dict[str, list[str]] = field(default_factory=dict)
    escaped_files: list[str] = field(default_factory=list)
    failed_backward: int = 0

    leak_entries: list[LeakEntry] | None = None
    probe_error: str = ""
    buffers_changed_by_eval: list[str] = field(default_factory=list)

    tensor_peak_bytes: int | None = None
    alive_tensors: list[AliveTensorsEntry] = field(default_factory=list)
