"""Pretrained checkpoints that `Accelerator.load_weights` reads into models.

Names and shapes are checked at once, and values are read when the model is prepared, so that a model on the meta device
never needs memory for all of it. Each rank reads only its own shards, once, and directly into the model's tensors.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from headway.common.text import format_bytes
from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.core.strategies.blocks import get_class_name
from headway.core.strategies.checkpoint_protocol import CheckpointStrategy
from headway.core.training._torch import is_fake
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.core.weights.dtensor_boxes import list_own_boxes
from headway.core.weights.files import StoredTensor, WeightFiles
from headway.core.weights.layer_data import load_layer_data, read_tensor
from headway.core.weights.locations import TensorLocation, map_locations, map_ties
from headway.core.weights.names import TensorSources, load_extra_states, match_names
from headway.core.weights.pieces import get_memory_key, make_slices
from headway.core.weights.transformers_names import Conversion
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_ADAPTED_LAYER = "base_layer."
"""Name prefix of tensors in the original layer that a PEFT layer adapts and keeps as its attribute `base_layer`."""


class PretrainedWeights:
    """Pretrained checkpoint whose tensor names have been matched to a model, before any value is read.

    Args:
        model: Model or part of one, on any device, meta included.
        weight_files: Stored tensors of the checkpoint.
        strict: Whether names unknown to the model and missing persistent buffers are an error.

    Attributes:
        source: Checkpoint as text, for messages.
        names: Names of the model's tensors that the checkpoint fills, without the components that adapters and
            `torch.compile` insert. All names of a tied tensor are included.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
    """

    def __init__(self, model: torch.nn.Module, weight_files: WeightFiles, strict: bool) -> None:
        self.source = weight_files.source
        self._model = model
        self._weight_files = weight_files
        self._stored_tensors: dict[str, StoredTensor] = self._weight_files.tensors  # by name in the checkpoint
        locations = _map_bare_locations(model)
        self._sources: TensorSources = match_names(model, locations, self._weight_files, strict, computes_buffers=True)
        ties = map_ties(locations)
        self.names = {name for source_name in self._sources.specs for name in ties.get(source_name, [source_name])}

    def read(self, tensors: Mapping[str, Any], everyone: Collectives) -> int:
        """Fill the given tensors of the model from the checkpoint. Every rank must call this method.

        If transformers has to convert a weight after reading, one rank reads and converts it, and broadcasts the
        result. Afterwards, load the extra states of modules (`set_extra_state`) from the checkpoint.

        Args:
            tensors: Tensors to fill, by their names in the model without the components that adapters and
                `torch.compile` insert.
            everyone: Collectives over all ranks.

        Returns:
            Number of bytes that this rank has read.

        Raises:
            CheckpointError: On every rank, if ranks see different files, a tensor is missing from `tensors`, or reading
                fails on one of them. If a tensor is missing or hashes reveal damage, nothing is loaded. After any other
                failed read, the model may contain a mixture of old and new weights.
        """
        descriptions = [(name, each.shape, str(each.dtype)) for name, each in sorted(self._stored_tensors.items())]
        digests = everyone.gather_numbers([digest_text(repr(descriptions))])
        if any(digest != digests[0] for digest in digests):
            raise CheckpointError(f"{self.source} contains other tensors on some ranks; give all ranks the same files")
        filled = set[Any]()  # memory of tensors that have been filled, because tied tensors share it
        num_bytes = 0

        def read_unconverted() -> None:
            nonlocal num_bytes
            for name, key in self._sources.direct.items():
                memory = get_memory_key(tensors[name])
                if memory in filled:
                    continue
                filled.add(memory)
                for offsets, box in list_own_boxes(tensors[name]):
                    self._stored_tensors[key].fill(box, offsets)
                    num_bytes += box.numel() * self._stored_tensors[key].dtype.itemsize
            # The layers have their quantization data on every rank. Sharding does not replace it.
            num_bytes += load_layer_data(
                _map_bare_locations(self._model), self._sources.layer_data, self._stored_tensors
            )

        self._run_on_all(
            lambda: self._check_targets(tensors), everyone, "no longer fits the model, and nothing was loaded"
        )
        self._run_on_all(lambda: self._verify(tensors), everyone, "is damaged or incomplete, and nothing was loaded")
        with torch.no_grad():
            self._run_on_all(read_unconverted, everyone)
            for number, conversion in enumerate(self._sources.conversions):
                # Conversions rotate over the ranks, so that no rank reads all of them.
                num_bytes += self._run_conversion(conversion, number % everyone.world_size, tensors, everyone)
        self._run_on_all(lambda: load_extra_states(self._model, self._sources, self._weight_files), everyone)
        return num_bytes

    def _check_targets(self, tensors: Mapping[str, Any]) -> None:
        """Check that the model still has all tensors that the checkpoint fills.

        Args:
            tensors: Tensors to fill, by their names in the model.

        Raises:
            CheckpointError: If a tensor is missing.
        """
        missing_name = next((name for name in self._sources.specs if name not in tensors), None)
        if missing_name is not None:
            raise CheckpointError(f"the model had {missing_name} when load_weights() was called, and has none now")

    def _verify(self, tensors: Mapping[str, Any]) -> None:
        """Check that the bytes that this rank will read match their hashes, if the checkpoint has hashes.

        Sources of conversions are checked completely, whichever tensors are given.

        Args:
            tensors: Tensors to fill, by their names in the model.

        Raises:
            CheckpointDamaged: If bytes differ from their hash.
        """
        targets = {key: tensors[name] for name, key in self._sources.direct.items()}
        converted = [key for each in self._sources.conversions for key, _ in each.sources]
        self._weight_files.verify(targets, [*converted, *self._sources.layer_data.values()])

    def _run_conversion(
        self, conversion: Conversion, rank: int, tensors: Mapping[str, Any], everyone: Collectives
    ) -> int:
        """Fill the tensors of one conversion on all ranks. One rank reads and converts the stored values.

        Args:
            conversion: Conversion of stored tensors to tensors of the model.
            rank: Rank that reads and converts the values, and broadcasts the result.
            tensors: Tensors to fill, by their names in the model.
            everyone: Collectives over all ranks.

        Returns:
            Number of bytes that this rank has read.
        """
        converted: dict[str, torch.Tensor] = {}
        is_reader = everyone.rank == rank

        def convert_values() -> None:
            if is_reader:
                converted.update(conversion.run(lambda key: read_tensor(self._stored_tensors[key])))

        self._run_on_all(convert_values, everyone)
        names: list[str] = everyone.broadcast_object(list(converted), rank)
        for name in names:
            spec = self._sources.specs[name]
            value = converted.pop(name).contiguous() if is_reader else torch.empty(spec.shape, dtype=spec.dtype)
            everyone.broadcast_into([value], rank)
            for offsets, box in list_own_boxes(tensors[name]):
                box.copy_(value[make_slices(offsets, box.shape)])
        return sum(self._stored_tensors[key].num_bytes for key, _ in conversion.sources) if is_reader else 0

    def _run_on_all(
        self,
        function: Callable[[], None],
        everyone: Collectives,
        result: str = "could not be read completely, so the model contains a mixture of old and new weights",
    ) -> None:
        """Call a function on every rank, and exchange whether it failed.

        Args:
            function: Function to call.
            everyone: Collectives over all ranks.
            result: Result of a failure, for the message. Default: some weights were already replaced.

        Raises:
            CheckpointError: On every rank, if the function failed on one of them.
        """
        failure: Exception | None = None
        try:
            function()
        except Exception as error:
            failure = error
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        reasons = [each for each in everyone.gather_objects(reason) if each is not None]
        if reasons:
            raise CheckpointError(f"{self.source} {result}: {reasons[0]}") from failure


class _UnreadNotice:
    """Forward pre-hook of a model whose pretrained weights have not been read. It warns once if the model computes.

    It refers neither to the model nor to its weights, so that the model can still be copied, pickled and freed.

    Args:
        source: Name of the checkpoint for the warning (`PretrainedWeights.source`).
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Warn once, unless a parameter is a meta or fake tensor, because the model then computes no values."""
        if not any(parameter.is_meta or is_fake(parameter) for parameter in module.parameters()):
            log.warning_once(
                "%s ran before the weights of load_weights() (%s) were read, because it was not prepared: it computed with its "
                "former weights. prepare() reads them: model = accelerator.prepare(model). To only evaluate a model, use "
                "accelerator.prepare_model(model, evaluation_mode=True)",
                get_class_name(module),
                self._source,
            )


class PretrainedLoads:
    """Registry of the pretrained checkpoints that `load_weights` requested for models that are not prepared yet.

    Args:
        strategy: Strategy that shards or replicates the models.
    """

    def __init__(self, strategy: CheckpointStrategy) -> None:
        self._strategy = strategy
        self._weights_by_module: weakref.WeakKeyDictionary[torch.nn.Module, PretrainedWeights] = (
            weakref.WeakKeyDictionary()
        )
        self._notices: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()  # hook handles

    def add(
        self, module: torch.nn.Module, weight_files: WeightFiles, strict: bool, prepared: Iterable[torch.nn.Module]
    ) -> None:
        """Register a checkpoint for a model, or for part of one.

        If the model is prepared, the checkpoint is read at once, and every rank must call this method. Otherwise
        `prepare()` reads it.

        Args:
            module: Model or part of one.
            weight_files: Stored tensors of the checkpoint.
            strict: Whether names unknown to the model and missing persistent buffers are an error.
            prepared: All prepared models.

        Raises:
            CheckpointError: If the checkpoint does not fit the model. If the checkpoint is read at once, also on every
                rank if one of them could not read a file.
        """
        model = next((each for each in prepared if any(module is inner for inner in each.modules())), None)
        if model is not None:
            self._strategy.free_gathered(model)
        self._weights_by_module[module] = PretrainedWeights(module, weight_files, strict)
        if model is not None:
            self.read(model)
        elif module not in self._notices:
            self._notices[module] = module.register_forward_pre_hook(_UnreadNotice(weight_files.source))

    def list_names(self, model: torch.nn.Module) -> set[str]:
        """Return the names of a model's tensors that will be filled from registered checkpoints."""
        names = set()
        for path, weights in self._find_registered(model):
            for name in map_locations(model.get_submodule(path)):
                if _remove_levels(name) in weights.names:
                    names.add(f"{path}.{name}".lstrip("."))
        return names

    def _find_registered(self, model: torch.nn.Module) -> list[tuple[str, PretrainedWeights]]:
        """Return pairs of (path of a module in the model, its checkpoint). The path of the model itself is ""."""
        modules = [(path, module) for path, module in model.named_modules() if module in self._weights_by_module]
        return [(path, self._weights_by_module[module]) for path, module in modules]

    def read(self, model: torch.nn.Module) -> None:
        """Read the registered checkpoints into a model after the strategy has set it up. All ranks call it.

        Each checkpoint is read only once. Do nothing if none is registered for the model or part of it.

        Raises:
            CheckpointError: On every rank, if a file could not be read on one of them, or ranks see different files.
        """
        registered = self._find_registered(model)
        if not registered:
            return
        everyone = self._strategy.everyone
        for path, weights in registered:
            prefix = remove_compiled_levels(f"{path}.") if path else ""
            tensors = {}
            for name, tensor in rename_bare_items(self._strategy.export_state(model)):
                if name.startswith(prefix):
                    tensors[_remove_levels(name.removeprefix(prefix))] = tensor
            num_bytes = weights.read(tensors, everyone)
            log.info("%s: this rank has read its part, %s", weights.source, format_bytes(num_bytes))
        self._strategy.apply_loaded_values()
        for module in list(model.modules()):
            self._weights_by_module.pop(module, None)
            notice = self._notices.pop(module, None)
            if notice is not None:
                notice.remove()


def _map_bare_locations(model: torch.nn.Module) -> dict[str, TensorLocation]:
    """Return the locations of a model's tensors, by their names without the components that adapters insert.

    Adapter tensors are left out.
    """
    adapted_layers = tuple(f"{path}." for path, module in model.named_modules() if hasattr(module, "base_layer"))
    locations = {}
    for name, location in map_locations(model).items():
        is_of_adapter = name.startswith(adapted_layers) and _ADAPTED_LAYER not in name
        if not is_of_adapter:
            locations[_remove_levels(name)] = location
    return locations


def _remove_levels(name: str) -> str:
    """Return a tensor's name without the components that adapters and `torch.compile` insert."""
    return remove_compiled_levels(name).replace(_ADAPTED_LAYER, "")
