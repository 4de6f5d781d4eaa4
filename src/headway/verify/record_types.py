"""Types of the JSON entries that `RunRecorder` writes about a run, with the meaning of each key. Imports no torch.

A line of the script is a text such as "train.py:12 in main".
"""

from typing import Literal, TypedDict, final

SampleKey = Literal["row_hashes", "unpadded_hashes", "indices"]
"""Key of `BatchEntry` by which samples are recognized."""


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


@final
class CallEntry(TypedDict, total=False):
    """Torch call behind a loss, or a tensor that no recorded call has made. `CallTrace` writes these entries.

    Attributes:
        line: Line of the script that makes the call or uses the tensor.
        func: Name of the function; "input" for a tensor that no recorded call has made.
        inputs: Index, among the calls of the loss, of the call that made each tensor argument.
        shape: Shape of the result. If there are several results, only the first one is recorded.
        row_sums: Three sums for each row of the result: of the values, of their absolute values, and of the values
            weighted by position. Absent for parameters, and for sharded, sparse, quantized, nested and meta tensors.
        is_cut: True if the result has no autograd graph, although an argument requires a gradient. Otherwise absent.
        numbers: Numbers among the arguments.
        number_names: Script's expression for each item of `numbers`, such as "self.mean"; "" if unknown.
        strings: Keyword arguments that are strings, such as the reduction.
        has_class_weights: Only for a loss function: whether class weights are passed.
        num_labels: Only for a loss function with integer labels: number of labels that are not ignored.
        ignores_labels: Only for a loss function with integer labels: whether any label is ignored.
        predicted_input: Only for a loss function: index of the call that made a model input, if the target is this
            input shifted by one step.
        module_name: Name of the innermost running module in its prepared model. Absent if it has no known weight.
        model_tensor: Only for an input: name of the prepared model's parameter or buffer.
        variable: Only for an input that is in no prepared model: description of the tensor, such as "keeper.rows" or
            "weight of a Linear"; "" if unknown.
    """

    line: str
    func: str
    inputs: list[int]
    shape: list[int]
    row_sums: list[list[float]]
    is_cut: bool
    numbers: list[float]
    number_names: list[str]
    strings: dict[str, str]
    has_class_weights: bool
    num_labels: int
    ignores_labels: bool
    predicted_input: int
    module_name: str
    model_tensor: str
    variable: str


@final
class LossEntry(TypedDict):
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


class SourceFacts(TypedDict, total=False):
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

    clock_lines: dict[str, str]
    unseeded_lines: dict[str, str]
    global_draw_lines: dict[str, str]
    seed_lines: dict[str, str]
    eval_lines: dict[str, str]
    suspects: dict[str, dict[str, str]]


@final
class RunFacts(SourceFacts, total=False):
    """What one rank has recorded about a run as a whole. A key is absent if the run ended before it was recorded.

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
        optimized_parameters: Names of the parameters that belong to a prepared optimizer.
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

        leak_entries: Results of the tests for leaks. Absent if the model was not tested.
        probe_error: Error that ended the tests for leaks.
        buffers_changed_by_eval: Names of the persistent buffers that a call in evaluation mode changes.

        tensor_peak_bytes: Peak memory of tensors, in bytes. Only in a run that measures it.
        alive_tensors: Tensors of earlier updates that were alive after the last update, by line.
    """

    rank: int
    data_shard_index: int
    strategy: str
    mixed_precision: str
    replays_batches: bool
    uses_accelerate_rules: bool
    uses_compilation: bool
    end_reason: str

    num_backwards: int
    saves: list[CheckpointEntry]
    loads: list[CheckpointEntry]

    trainable_parameters: list[str]
    frozen_parameters: list[str]
    optimized_parameters: list[str]
    trainable_dtypes: list[str]
    initial_hashes: dict[str, str]
    batch_norms: list[str]
    num_dropout_rates: int
    optimizers: list[OptimizerFacts]
    lost_optimizer_state: bool
    scheduler_metrics: list[MetricEntry]

    loaders: dict[str, LoaderEntry]
    changed_dataset_tensors: dict[str, list[str]]
    indivisible_batch_size: int
    slow_functions: list[SlowFunctionEntry]

    generator_hashes: dict[str, str]
    draw_lines: dict[str, str]
    unshared_draw_lines: dict[str, str]
    num_dropout_calls: int
    reversed_listing_lines: list[str]

    write_lines: dict[str, list[str]]
    escaped_files: list[str]
    failed_backward: int

    leak_entries: list[LeakEntry]
    probe_error: str
    buffers_changed_by_eval: list[str]

    tensor_peak_bytes: int
    alive_tensors: list[AliveTensorsEntry]
