"""Context parallelism: each rank computes a shard of every sequence, from a model's first block to its loss.

The model is called with full sequences, which are equal on all ranks of the axis. Embeddings and positions are
computed on full sequences. The first block's input is sharded (`sequences.split_sequence`), and so are the other
arguments of blocks: rotary embeddings, position IDs, and rows of masks. Attention within blocks uses
`WholeSequenceAttention`. Everything else is computed token by token.

If the model gets labels, they are sharded, too. The model's loss is then the sum of the ranks' terms, and logits stay
sharded. Without labels, the model's outputs are all-gathered. Some models need full sequences after their blocks (to
pool a token, or to reshape to the full length). For these, the last block's output is all-gathered. In each case, a
rank computes the gradient of its own term of the loss.

In a pipeline the first stage shards the sequences, and stages send shards to each other. Each stage shards the other
arguments of its blocks.

The first call begins with a dry run on a few tokens (`dry_run.py`), once with full and once with sharded sequences.
The dry run finds which of these cases applies. If a model mixes tokens outside of torch's attention function, the dry
run raises an error, so that the model does not compute a wrong result.
"""

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, NamedTuple

import torch

from headway.core.config.parallelism import TensorParallelOptions, TorchContextParallelConfig
from headway.core.memory.oom import is_out_of_memory
from headway.core.runtime.collectives import tree
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.blocks import find_blocks, get_class_name
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.axes import AxisOptions, ModelAxis, SplitModel
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.layouts.adapters import check_added_keys, keep_packing
from headway.layouts.context import attention, dry_run, sequences
from headway.layouts.context.attention import WholeSequenceAttention, install_attention, remove_attention
from headway.layouts.context.ring_attention import RING_STEP, RingDispatcher, find_ring_attention
from headway.layouts.context.split_labels import LabeledCall, SplitLabels
from headway.layouts.tensor import crossings
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG
from headway.log import get_logger

log = get_logger(__name__)

_FEATURE_NAMES = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""transformers' names of model inputs whose features replace placeholder tokens of `input_ids`."""


class CallPhase(Enum):
    """Kind of call during which a block of the model runs.

    Attributes:
        NONE: The block is called outside of the prepared model.
        FULL: The model is called with full sequences.
        SPLIT: The model is called with its sequences split across ranks.
        BACKWARD: Backward pass, in which activation checkpointing can recompute blocks.
    """

    NONE = "no call of the prepared model"
    FULL = "a call with full sequences"
    SPLIT = "a call with sharded sequences"
    BACKWARD = "backward, in which blocks may be recomputed"


class SplitRegion(Enum):
    """Part of a model that computes on sequence shards, and the kind of the model's loss.

    Attributes:
        MEANS: The whole model. Its loss, if any, is a mean over labels.
        SUMS: The whole model. Its loss is a sum over labels.
        BLOCKS: Only the blocks. The code after them computes on full sequences.
    """

    MEANS = "to its outputs, or to a loss that is a mean over labels"
    SUMS = "to its outputs, or to a loss that is a sum over labels"
    BLOCKS = "to the end of its last block"


class CallKind(NamedTuple):
    """Properties of a model's call that affect its split region. One dry run is done for each kind.

    Attributes:
        has_labels: Whether the call has labels.
        has_item_count: Whether the call passes `num_items_in_batch`.
    """

    has_labels: bool
    has_item_count: bool


class _RegionTrial(NamedTuple):
    """Result of trying split regions in a dry run.

    Attributes:
        region: Region for which the outputs equal those of full sequences, or None if there is none.
        difference: Description of the first difference if there is no region, else "".
    """

    region: SplitRegion | None
    difference: str = ""


class DryRunFinished(BaseException):
    """Raised to unwind the caller once a dry run has found how the model is split. Not an error."""


class ContextAxis(ModelAxis):
    """Mesh axis "cp" for context parallelism, in which ranks compute shards of the same sequences.

    Args:
        options: Options of the run for all mesh axes.

    Raises:
        UnsupportedError: If options of tensor parallelism also split sequences.
    """

    def __init__(self, options: AxisOptions) -> None:
        super().__init__(options)
        check_options(options.tensor, options.layout.cp)

    def split_model(
        self, model: torch.nn.Module, mesh: Any, ranks: Collectives, other_stage_ids: Container[int] = ()
    ) -> "ContextParallel":
        """Register hooks that split the model's sequences, and return a callable that replaces the model.

        Args:
            model: Model to split.
            mesh: DeviceMesh of the run, with an axis "cp".
            ranks: Collectives over all ranks of the run.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold. They have no effect here,
                because no parameter is split.

        Raises:
            PrepareError: If the model cannot be split.
        """
        is_exact = self.options.number_format == "no" and self.options.sharding.param_dtype in (None, "float32")
        return ContextParallel(model, mesh["cp"], ranks, self.options.context, is_exact)


class ContextParallel(SplitModel):
    """Callable that replaces a model and runs it with its sequences sharded across ranks.

    Args:
        model: Decoder or encoder with one stack of blocks.
        mesh: One-dimensional DeviceMesh of the ranks.
        everyone: Collectives over all ranks of the run.
        options: Options of context parallelism.
        is_exact: Whether the model computes in float32 throughout. Default: True.

    Attributes:
        serves_evaluation: Whether calls without gradients also run through this object. Always True.
        is_in_stage: Function that returns whether the current call is made by a pipeline stage. Ranks of other stages
            then call the model at other times, so errors are raised on this rank only.

    Raises:
        PrepareError: If the model cannot be split.
    """

    serves_evaluation = True

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Any,
        everyone: Collectives,
        options: TorchContextParallelConfig,
        is_exact: bool = True,
    ) -> None:
        self._model = model
        self._everyone = everyone
        self._options = options
        self._is_exact = is_exact
        self._axis = SplitAxis.from_mesh(mesh)
        check_added_keys(
            model, "Context parallelism splits queries and keys alike, but no rank has queries for these keys"
        )
        keep_packing(model)  # the dry run is in eval mode
        blocks = _find_block_stack(model, options)
        self._restore_attention = attention.use_sdpa(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._labels = SplitLabels(model, _list_positional(self._parameters), options, self._axis, everyone)
        self._ring = find_ring_attention(
            mesh,
            options.cp_comm_strategy or "allgather",
            everyone.runtime.scope.get_or_create(RingDispatcher),
        )
        ring = None if self._ring is None else self._ring.attend
        self._attention = WholeSequenceAttention(self._axis, ring, options.cp_style)
        self._rng_states = SplitRNG(self._axis)
        self._phase = CallPhase.NONE
        self._length = 0
        self._is_in_backward = False
        self._stops_after_dry_run = False
        self.is_in_stage: Callable[[], bool] = lambda: False
        self._region_by_kind: dict[CallKind, SplitRegion] = {}
        self._kinds_with_loss: set[CallKind] = set()
        self._region = SplitRegion.MEANS
        self._blocks = blocks
        self._hooks: list[Any] = []
        try:
            for block in blocks:
                install_attention(block, self._attention)
                self._hooks.append(block.register_forward_pre_hook(self._before_block, with_kwargs=True))
                self._hooks.append(block.register_forward_hook(self._after_any_block, always_call=True))
        except BaseException:
            self.release()
            raise
        self._hooks.append(blocks[-1].register_forward_hook(self._after_last_block))

    def release(self) -> None:
        """Remove all hooks and restore the model's blocks and attention."""
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            remove_attention(block)
        if self._ring is not None:
            self._ring.release()
        if self._restore_attention is not None:
            self._restore_attention()

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Return a context for backward, in which recomputed blocks get this rank's sequence shard."""
        with self._set_phase(CallPhase.BACKWARD):
            self._is_in_backward = True
            self._attention.set_active(True)
            try:
                yield
            finally:
                self._is_in_backward = False
                self._attention.set_active(False)

    @contextmanager
    def _set_phase(self, phase: CallPhase) -> Iterator[None]:
        """Return a context in which blocks run in the given phase. The outer phase is restored afterwards."""
        outer_phase = self._phase
        self._phase = phase
        try:
            yield
        finally:
            self._phase = outer_phase

    # ---------------------------------------------------------------- stages of a pipeline

    @property
    def mode(self) -> tuple[CallPhase, SplitRegion]:
        """Pair of (phase, split region) of the current call.

        Together with the shapes of the inputs, it determines the shapes of activations.
        """
        return self._phase, self._region

    def record_length(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the length of the full sequences when the first block is called on this or another pipeline stage.

        Do nothing unless the model is called with its sequences sharded.

        Args:
            args: Positional arguments of the first block.
            kwargs: Keyword arguments of the first block.
        """
        if self._phase is CallPhase.SPLIT:
            self._set_length(self._find_activations(args, kwargs))

    def run_dry_run_only(self, call: Callable[[], object]) -> None:
        """Find out with a dry run how the model can be split, unless this is known for calls of this kind.

        `call` ends where it calls the model, so the actual forward does not run. All ranks must call this method.

        Args:
            call: Function that calls the model.

        Raises:
            PrepareError: If the model cannot be split.
            UnsupportedError: If the model is compiled.
        """
        self._stops_after_dry_run = True
        try:
            with suppress(DryRunFinished):
                call()
        finally:
            self._stops_after_dry_run = False

    # ---------------------------------------------------------------- calls of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with its sequences sharded, given full sequences that are equal on all ranks of the axis.

        A loss that the model computes is returned for all tokens. Sharded outputs are all-gathered. If the model
        computes the loss itself while gradients are enabled, sharded outputs are replaced by `PartialOutput` instead.
        Without gradients, a call that uses a key-value cache is not sharded.

        Raises:
            PrepareError: If the model does not compute equal results with sharded sequences.
            UnsupportedError: If this call cannot be split, for example because it uses a key-value cache while
                gradients are enabled, or gets images, videos or audio in addition to tokens.
            DataError: If sequences must be padded, but the labels or the attention do not allow it.
            DryRunFinished: In `run_dry_run_only`, before the model would run.
        """
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    "context parallelism shards sequences, and a KV cache would contain only this rank's shard; leave out "
                    "use_cache and past_key_values while training (generation under torch.no_grad() computes full sequences)"
                )
            return self._run(CallPhase.FULL, args, kwargs)
        _refuse_features(kwargs)
        if "use_cache" in self._parameters:
            kwargs = {**kwargs, "use_cache": False}
        kind = self._classify_call(args, kwargs)
        if kind not in self._region_by_kind:
            if self.is_in_stage():
                raise UnsupportedError(
                    f"{get_class_name(self._model)} now receives labels or num_items_in_batch, but did not when the same function "
                    "was called for this micro-batch before; with context and pipeline parallelism, it must do the same each time"
                )
            self._region_by_kind[kind] = self._dry_run(args, kwargs)
        if self._stops_after_dry_run:
            raise DryRunFinished
        region = self._region_by_kind[kind]
        call = self._split_call(args, kwargs, region)
        out = self._run(CallPhase.SPLIT, call.args, call.kwargs, region)
        if kind not in self._kinds_with_loss and _has_loss(call, out):
            raise PrepareError(
                f"{get_class_name(self._model)} computes a loss from labels while training, but not in eval() mode, in which context "
                "parallelism compares its sharded and full outputs; compute the loss in both modes, or outside of the model"
            )
        return self._join_output(call, out, region, is_training=torch.is_grad_enabled())

    def _run(
        self, phase: CallPhase, args: tuple[Any, ...], kwargs: dict[str, Any], region: SplitRegion = SplitRegion.MEANS
    ) -> Any:
        """Call the model, and return its output.

        Args:
            phase: Whether the model's sequences are split.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            region: Part of the model that computes on sequence shards. Ignored if sequences are not split.

        Raises:
            PrepareError: If sequences are split, but the model has not called its first block.
        """
        self._length = 0
        self._region = region
        with self._set_phase(phase):
            out = self._model(*args, **kwargs)
        if phase is CallPhase.SPLIT and not self._length:
            raise PrepareError(
                f"{get_class_name(self._model)} did not call its first block, where sequences are sharded; use fsdp or tp"
            )
        return out

    def _classify_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKind:
        """Return the kind of a call. A dry run finds the split region before the first call of each kind."""
        return CallKind(
            has_labels=bool(self._labels.find_labels(args, kwargs)),
            has_item_count=kwargs.get("num_items_in_batch") is not None,
        )

    def _split_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], region: SplitRegion) -> LabeledCall:
        """Return the model's call with sharded labels.

        Labels stay complete if only the blocks compute on sequence shards.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            region: Part of the model that computes on sequence shards.
        """
        if region is SplitRegion.BLOCKS:
            return LabeledCall(args, dict(kwargs))
        return self._labels.split_call(args, kwargs, self.is_in_stage())

    def _join_output(self, call: LabeledCall, out: Any, region: SplitRegion, is_training: bool) -> Any:
        """Return the output for the caller.

        The loss is summed over ranks, and sharded tensors are all-gathered or replaced.

        Args:
            call: Call of the model, with sharded labels.
            out: Output of the model.
            region: Part of the model that computes on sequence shards.
            is_training: Whether gradients are enabled. If so and there is a loss, sharded tensors are replaced by
                `PartialOutput`.
        """
        has_loss = _has_loss(call, out)
        shard_length = sequences.pad_length(self._length, self._axis) // self._axis.size

        def join_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if region is SplitRegion.BLOCKS:
                return sequences.divide_gradient(leaf, self._axis)
            if _is_loss(leaf):
                return self._reduce_loss(leaf, call, region) if has_loss else leaf
            if leaf.dim() < 2 or leaf.shape[1] != shard_length:
                return leaf
            if has_loss and is_training:
                return PartialOutput(leaf.shape, self._length)
            return sequences.join_sequence(leaf, self._axis, 1, self._length)

        return tree.map_leaves(join_leaf, out)

    def _reduce_loss(self, loss: torch.Tensor, call: LabeledCall, region: SplitRegion) -> torch.Tensor:
        """Return the loss over all ranks: a sum, or a mean over the labels that are not ignored.

        A mean over no labels is NaN.
        """
        if region is SplitRegion.SUMS or call.num_labels is None:
            return crossings.sum_terms(loss, self._axis)
        num_all, num_own = call.num_labels
        # If this rank's shard has no labels, its mean is 0 / 0.
        term = torch.where(num_own > 0, loss * (num_own / num_all), torch.zeros_like(loss))
        mean = crossings.sum_terms(term, self._axis)
        return torch.where(num_all > 0, mean, torch.full_like(mean, torch.nan))

    # ---------------------------------------------------------------- the first call

    def _dry_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitRegion:
        """Run the model on a few tokens, with full and with sharded sequences.

        Returns:
            Part of the model that can compute on shards, because the results of both runs agree.

        Raises:
            PrepareError: On all ranks, if the results agree for no split region.
            UnsupportedError: If the model is compiled, because attention calls in compiled code cannot be intercepted.
        """
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in self._model.modules()):
            raise UnsupportedError(
                f"{get_class_name(self._model)} is compiled, which context parallelism does not support: it replaces the attention "
                "calls of the blocks, and compiled code makes no calls that could be replaced. Leave torch.compile (dynamo_backend) "
                "out, or use fsdp or tp, which support it"
            )
        args, kwargs = _pass_by_name(self._parameters, args, kwargs)
        labels = self._labels.find_labels(args, kwargs)
        args, kwargs = dry_run.shorten_arguments(args, kwargs, RING_STEP * self._axis.size, self._options.labels)
        difference = ""
        with dry_run.enter_evaluation(self._model):
            if labels:
                with self._labels.observe_ignored_label():
                    self._run(CallPhase.FULL, args, kwargs)
                ignored = self._labels.choose_dry_run_label(labels)
                kwargs = dry_run.ignore_some_labels(kwargs, labels.keys() & kwargs.keys(), ignored)
            full_output = self._run(CallPhase.FULL, args, kwargs)
            for regions in ((SplitRegion.MEANS, SplitRegion.SUMS), (SplitRegion.BLOCKS,)):
                trial = self._try_regions(regions, args, kwargs, full_output)
                # All ranks must use the same region, or all must raise the error.
                results = self._everyone.gather_numbers(
                    [float(trial.region is not None), float(trial.region is SplitRegion.SUMS)]
                )
                if trial.region is not None and all(result == results[0] for result in results):
                    if trial.region is SplitRegion.BLOCKS:
                        log.info_once(
                            "context parallelism: the layers after the blocks of %s need full sequences, so the blocks' "
                            "output is gathered, and each rank computes the head and the loss for all tokens",
                            get_class_name(self._model),
                        )
                    return trial.region
                difference = trial.difference or "the results of this rank agree, but not those of another"
        raise PrepareError(
            f"{get_class_name(self._model)} cannot shard its sequences (context parallelism): {difference}. {dry_run.ADVICE}"
        )

    def _try_regions(
        self, regions: tuple[SplitRegion, ...], args: tuple[Any, ...], kwargs: dict[str, Any], full_output: Any
    ) -> "_RegionTrial":
        """Return the first split region for which the outputs equal those of full sequences, if there is one.

        Args:
            regions: Split regions to try.
            args: Positional arguments of the dry run.
            kwargs: Keyword arguments of the dry run.
            full_output: Output for full sequences.
        """
        self._attention.reset_calls()
        first_difference = ""
        try:
            call = self._split_call(args, kwargs, regions[0])
            out = self._run(CallPhase.SPLIT, call.args, call.kwargs, regions[0])
            if not self._attention.num_calls:
                return _RegionTrial(None, "its blocks never call torch.nn.functional.scaled_dot_product_attention")
            for region in regions:
                output = self._join_output(call, out, region, is_training=False)
                is_joined = region is not SplitRegion.BLOCKS
                difference = dry_run.describe_difference(full_output, output, self._is_exact, is_loss_joined=is_joined)
                if not difference:
                    if _has_loss(call, out):
                        self._kinds_with_loss.add(self._classify_call(args, kwargs))
                    return _RegionTrial(region)
                first_difference = first_difference or difference
        except Exception as error:  # from the model's code, which may not expect shorter tensors
            fsdp_state.reshard_units(self._model)
            if isinstance(error, DataError) or is_out_of_memory(error):  # caused by this batch, not by the model
                raise
            log.debug("dry run of context parallelism", exc_info=True)
            first_difference = f"{type(error).__name__}: {error}"
        return _RegionTrial(None, first_difference)

    # ---------------------------------------------------------------- calls of blocks

    def _before_block(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a block's forward, return its arguments with this rank's sequence shards, as (args, kwargs).

        The first block's activations are split. Later blocks get shards from the block before them. In training, also
        switch to this rank's RNG state. In calls with full sequences, return None, so that torch keeps the arguments.

        Raises:
            UnsupportedError: If the block is called outside of the prepared model while gradients are enabled.
            PrepareError: If the block's first argument is not (rows, tokens, width), or if the model changes the length
                of its sequences between blocks.
        """
        if self._phase is CallPhase.FULL:
            return None
        if self._phase is CallPhase.NONE:
            if not torch.is_grad_enabled():  # such as generation, which computes full sequences
                return None
            raise UnsupportedError(
                f"a part of {get_class_name(self._model)} was called by itself while training; under context parallelism call the "
                "prepared model, which shards the input sequences of its blocks"
            )
        activations = self._find_activations(args, kwargs)
        is_first = block is self._blocks[0]
        if is_first and self._phase is CallPhase.SPLIT:
            self._set_length(activations)
        shard = sequences.split_sequence(activations, self._axis, 1) if is_first else activations
        padded_length = shard.shape[1] * self._axis.size
        if self._phase is CallPhase.SPLIT and sequences.pad_length(self._length, self._axis) != padded_length:
            raise PrepareError(
                f"{get_class_name(self._model)} changes the length of its sequences between blocks, but the sequences are sharded"
            )

        def split_leaf(leaf: Any) -> Any:
            is_other_tensor = isinstance(leaf, torch.Tensor) and leaf is not activations
            return self._split_argument(leaf, padded_length) if is_other_tensor else leaf

        def split_value(value: Any) -> Any:
            return shard if value is activations else tree.map_leaves(split_leaf, value)

        split_args = tuple(split_value(value) for value in args)
        split_kwargs = {name: split_value(value) for name, value in kwargs.items()}
        if block.training:
            self._rng_states.use_rank_state()
        if self._phase is CallPhase.SPLIT:
            self._attention.set_active(True)
        return split_args, split_kwargs

    def _find_activations(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the activations that are a block's input, which must be its first argument.

        Raises:
            PrepareError: If the first argument is not a tensor of at least three dimensions.
        """
        if args:
            first = args[0]
        else:
            first = next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
        if not isinstance(first, torch.Tensor) or first.dim() < 3:
            raise PrepareError(
                f"the first argument of the blocks of {get_class_name(self._model)} must be (rows, tokens, width), to be split "
                f"along the sequence, but one got {tuple(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__}"
            )
        return first

    def _set_length(self, activations: torch.Tensor) -> None:
        """Record the length of the full sequences, without padding, from the first block's input."""
        self._length = activations.shape[1]
        self._attention.set_length(self._length)

    def _after_any_block(self, *_: Any) -> None:
        """After a block's forward, switch back to the RNG state that all ranks share, and disable the attention mode.

        In backward, the mode stays enabled. The hook also runs if the forward raised an error.
        """
        self._rng_states.use_common_state()
        self._attention.set_active(self._is_in_backward)

    def _after_last_block(self, block: torch.nn.Module, args: Any, output: Any) -> Any:
        """After the last block, return its output for full sequences if the code after the blocks needs them.

        Each rank then computes the same loss, whose gradient is divided by the number of ranks (`divide_gradient`). So
        backward multiplies the gradient of this rank's shard by this number.
        """
        if self._phase is not CallPhase.SPLIT or self._region is not SplitRegion.BLOCKS:
            return None

        def join_shards(shard: torch.Tensor) -> torch.Tensor:
            return sequences.join_sequence(shard, self._axis, 1, self._length, grad_factor=self._axis.size)

        return (join_shards(output[0]), *output[1:]) if isinstance(output, tuple) else join_shards(output)

    def _split_argument(self, tensor: torch.Tensor, padded_length: int) -> torch.Tensor:
        """Return this rank's shard of a block's argument, split along the dimension that is as long as the sequence.

        Return the tensor unchanged if it has no such dimension.

        Args:
            tensor: Argument other than the activations, such as a mask or rotary embeddings.
            padded_length: Length of the padded sequence in tokens.
        """

        def has_sequence_length(dim: int) -> bool:
            if tensor.dim() < -dim:
                return False
            if self._phase is CallPhase.SPLIT:
                return tensor.shape[dim] == self._length
            # In backward `_length` may be that of a later call.
            return sequences.pad_length(tensor.shape[dim], self._axis) == padded_length

        is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if is_integer and has_sequence_length(-1):  # position IDs
            return sequences.split_sequence(tensor, self._axis, -1)
        if has_sequence_length(-2):  # rows of a mask, or a vector for each token
            return sequences.split_sequence(tensor, self._axis, -2, filler=tensor.dtype == torch.bool)
        if tensor.dim() < 3 and has_sequence_length(-1):
            return sequences.split_sequence(tensor, self._axis, -1)
        return tensor


class PartialOutput:
    """Placeholder for an output, such as logits, of which this rank has only a sequence shard. Any use raises an error.

    While gradients are enabled, it replaces such outputs of models that compute the loss themselves.

    Args:
        shape: Shape of this rank's shard.
        length: Length of the full sequence in tokens.
    """

    def __init__(self, shape: torch.Size, length: int) -> None:
        self._shape = tuple(shape)
        self._length = length

    def _raise_partial(self, *_: Any) -> Any:
        """Raise `UnsupportedError`, with advice on how to get the full output."""
        raise UnsupportedError(
            f"this output of the model is sharded along the sequence: each rank has {self._shape[1]} of {self._length} tokens. To "
            "use it while training, call the model without labels. Under torch.no_grad(), the full output is returned even "
            "with labels"
        )

    def __getattr__(self, name: str) -> Any:
        """Raise an error that explains how to get the full output.

        Raises:
            AttributeError: For names that begin with two underscores, as protocols such as copying and pickling expect.
            UnsupportedError: For all other names.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        return self._raise_partial()

    __getitem__ = __iter__ = __len__ = __add__ = __mul__ = __truediv__ = __sub__ = __float__ = _raise_partial


def check_options(tensor: TensorParallelOptions, num_ranks: int) -> None:
    """Raise an error if options of tensor parallelism cannot be combined with context parallelism.

    Args:
        tensor: Options of tensor parallelism.
        num_ranks: Number of ranks that split each sequence.

    Raises:
        UnsupportedError: If `sequence_parallel` or `loss_parallel` is set and there are several ranks.
    """
    enabled = [name for name in ("sequence_parallel", "loss_parallel") if num_ranks > 1 and getattr(tensor, name)]
    if enabled:
        raise UnsupportedError(
            f"context parallelism (cp={num_ranks}) shards sequences itself, which does not work with TensorParallelOptions("
            f"{', '.join(f'{name}=True' for name in enabled)}); drop {' and '.join(enabled)}, or cp"
        )


def _list_positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the parameters that a call can fill by position, in order, without `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def _pass_by_name(
    parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of an equal call that passes as many arguments as possible by name.

    Args:
        parameters: Parameters of the called function, by name.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # what precedes `*args` can then be passed by position only
        return args, dict(kwargs)
    num_unnamed = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    named = zip(_list_positional(parameters)[num_unnamed:], args[num_unnamed:])
    return args[:num_unnamed], {**dict(named), **kwargs}


def _is_loss(leaf: Any) -> bool:
    """Whether a value in a model's output is a loss: a floating-point tensor without dimensions."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _has_loss(call: LabeledCall, out: Any) -> bool:
    """Whether the model has computed a loss from labels that were split."""
    return call.num_labels is not None and any(_is_loss(each) for each in tree.list_tensors(out))


def _refuse_features(kwargs: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` if a call gets images, videos or audio in addition to tokens.

    Their features replace placeholder tokens. The dry run drops most of these tokens but no features, and some models
    add features in later blocks, too, whose input is split.

    Args:
        kwargs: Keyword arguments of the call.
    """
    features = [name for name in _FEATURE_NAMES if kwargs.get(name) is not None]
    if features and kwargs.get("input_ids") is not None:
        raise UnsupportedError(
            f"context parallelism does not support {', '.join(features)} together with input_ids: features of images, videos "
            "or audio replace tokens of the sequence, which is split between ranks. Use fsdp or tp"
        )


def _find_block_stack(model: torch.nn.Module, options: TorchContextParallelConfig) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model, in order.

    Raises:
        PrepareError: If there are none, or if they are not children of one module.
    """
    blocks = find_blocks(model, options.blocks)
    parents = [module for module in model.modules() if blocks and any(c is blocks[0] for c in module.children())]
    sibling_ids = {id(child) for child in parents[0].children()} if parents else set()
    if not all(id(block) in sibling_ids for block in blocks) or not blocks:
        class_names = ", ".join(sorted({type(block).__name__ for block in blocks})) or "none"
        raise PrepareError(
            f"context parallelism needs one stack of blocks that processes the full sequence; {get_class_name(model)} has these "
            f"repeated blocks, which are not in one ModuleList: {class_names}. Models with an encoder and a decoder, or with a "
            "tower for images or audio, are not supported: use fsdp or tp. If only one kind of these blocks processes the "
            "sequence, name it in TorchContextParallelConfig(blocks=...)"
        )
    return blocks
