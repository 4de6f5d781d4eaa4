"""Export weights for other programs: safetensors files, the files `from_pretrained` needs, and uploads to the Hub.

New files are written under temporary names in the target folder, then renamed.

This module depends on neither transformers nor PEFT. If a model has a `config` or a `generation_config` with a
`save_pretrained` method, these are exported too. A model with adapters and its own `save_pretrained` writes its
adapters itself. Tokenizer files come from objects that the caller passes, or from the folder or Hub cache from which
the model was loaded. Nothing is downloaded.
"""

import copy
import io
import json
import logging
import pickle
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from headway.common.atomic import open_replacement, write_text
from headway.common.object_path import open_writable, to_path
from headway.common.optional import require
from headway.common.text import parse_bytes
from headway.core.weights.parallel_writer import (
    LazyFullTensor,
    ParallelWriter,
    RangedFile,
    check_specs,
    count_threads,
    verify_range,
)
from headway.core.weights.pieces import get_memory_key
from headway.core.weights.shards import TensorSpec, order_widest_first, write_file
from headway.errors import ConfigError
from headway.log import get_logger

# A separate logger, so that HEADWAY_LOG_LEVEL does not make every rank log each file.
log = get_logger("headway.core.weights.published")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PATTERNS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "chat_template.*", "preprocessor_config.json",
    "processor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Name patterns of the files that accompany weights: configurations, tokenizers and processors."""
_TOKENIZER_PATTERNS = PATTERNS[3:]


def split_ties(tensors: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate tensors that must be written from names that are tied to another tensor.

    Names that refer to exactly the same memory in the same layout are tied. Views that merely share a buffer are not,
    and neither are tensors without elements.

    Args:
        tensors: Pairs of (name, tensor).

    Returns:
        Pair of (tensors to write by name, mapping from each tied name to the name under which the tensor is written).
    """
    kept: dict[str, Any] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        key = get_memory_key(tensor)
        if prod(tensor.shape) and key in owners:
            tied[name] = owners[key]
        else:
            owners[key] = name
            kept[name] = tensor
    return kept, tied


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """Split tensor names, in order, into shards of at most `max_shard_size` bytes.

    A tensor that exceeds this size gets its own shard. The result equals that of huggingface_hub's
    `split_torch_state_dict_into_shards`. Therefore the shard of an oversized tensor is placed before the shard that is
    being filled, and filling then continues.

    Args:
        sizes: Sizes of the tensors in bytes, by name.
        max_shard_size: Maximum bytes per shard.

    Returns:
        Tensor names of each shard.
    """
    shards: list[list[str]] = []
    filling: list[str] = []
    free_bytes = max_shard_size
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if size > free_bytes:
            shards.append(filling)
            filling, free_bytes = [], max_shard_size
        filling.append(name)
        free_bytes -= size
    return [*shards, filling] if filling or not shards else shards


def save_weights(
    tensors: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]], folder: str | Path, max_shard_size: int | str
) -> list[Path]:
    """Write tensors to safetensors files in a folder and return the paths of the files.

    Files that earlier saves have left in the folder are replaced or removed.

    Args:
        tensors: Pairs of (name, tensor). Tensors that are not in memory are assembled one at a time, when they are
            written.
        folder: Folder to write. It is created if missing.
        max_shard_size: Maximum bytes per file, as a number or text such as "10GB".

    Raises:
        ConfigError: If the folder is a file, or `max_shard_size` is not a size.
        CheckpointError: If a file, when read back, differs from the tensors. The folder is then unchanged.
        OSError: If the disk is full or not writable. The folder is then unchanged.
    """
    target = _make_folder(folder)
    with open_writable(target) as local:
        files = [target / name for name in _write_tensors(tensors, local, max_shard_size)]
    _remove_stale(target, {file.name for file in files})
    return files


def _write_tensors(tensors: Iterable[tuple[str, Any]], folder: Path, max_shard_size: int | str) -> list[str]:
    """Write tensors to safetensors files, and an index if there are several. Return the names of the files."""
    kept, tied = split_ties(tensors)
    shards = _plan_shards_of(kept, max_shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    with ExitStack() as stack:  # no file is replaced before all are written
        files = {
            stack.enter_context(open_replacement(folder / file)): {name: kept[name] for name in shard}
            for file, shard in zip(names, shards)
        }
        logging.getLogger(__name__).info("writing %s to %s", ", ".join(names), folder)
        _write_and_compare(files, tied)
    if len(shards) > 1:
        total = sum(_make_spec(tensor).num_bytes for tensor in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        names.append(INDEX)
    return names


def save_pickled(state: dict[str, torch.Tensor], folder: str | Path) -> Path:
    """Write tensors with torch.save to one `pytorch_model.bin`, and remove files of earlier saves from the folder.

    Args:
        state: State dict to write.
        folder: Folder to write. It is created if missing.

    Returns:
        Path of the written file.

    Raises:
        ConfigError: If the folder is a file.
    """
    target = _make_folder(folder)
    _warn_of_code(state)
    save_object(state, target / PICKLED)
    _remove_stale(target, {PICKLED})
    return target / PICKLED


def _warn_of_code(state: Mapping[str, Any]) -> None:
    """Warn about modules' extra states that Headway will refuse to load, because reading them could execute code."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            continue
        try:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError:
            logging.getLogger(__name__).warning(
                "%s contains an object (%s) that torch.load(weights_only=True) and load_checkpoint_in_model() refuse: the whole "
                "file can only be read with torch.load(weights_only=False). Let get_extra_state() return numbers, text, tensors, "
                "and lists and dicts of them",
                name,
                type(value).__name__,
            )


def save_object(obj: Any, path: str | Path, safe_serialization: bool = False) -> None:
    """Write an object with torch.save, or a dict of tensors as safetensors. The file is replaced atomically.

    In safetensors, a tied tensor is written once. The metadata records its other names.

    Args:
        obj: Object to write.
        path: File to write.
        safe_serialization: Whether to use safetensors. Default: False.

    Raises:
        ConfigError: If safetensors was requested and the object is not a dict of tensors.
    """
    if safe_serialization and not _is_state(obj):
        raise ConfigError(
            f"safe_serialization=True got a {type(obj).__name__}; a safetensors file contains a dict of names and tensors. Pass "
            "safe_serialization=False for other objects"
        )
    path = to_path(path)
    with open_writable(path.parent) as folder, open_replacement(folder / path.name) as staged:
        if safe_serialization:
            kept, tied = split_ties(obj.items())
            write_file(
                staged, order_widest_first({name: _make_spec(each) for name, each in kept.items()}), kept.items(), tied
            )
        else:
            torch.save(obj, staged)


def _is_state(obj: Any) -> bool:
    return isinstance(obj, Mapping) and all(isinstance(value, torch.Tensor) for value in obj.values())


def _plan_shards_of(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[list[str]]:
    return plan_shards(
        {name: _make_spec(each).num_bytes for name, each in tensors.items()}, parse_bytes(max_shard_size)
    )


def list_write_order(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[str]:
    """Return the tensors' names in the order in which `save_weights` writes them. No two of the tensors may be tied.

    Args:
        tensors: Tensors by name.
        max_shard_size: Maximum bytes per file, as a number or text such as "10GB".
    """
    shards = _plan_shards_of(tensors, max_shard_size)
    return [
        name for shard in shards for name in order_widest_first({each: _make_spec(tensors[each]) for each in shard})
    ]


def _make_spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _write_and_compare(files: Mapping[Path, Mapping[str, Any]], tied: Mapping[str, str]) -> None:
    """Write files. Each file is read back and compared. If several threads write, the next file is written meanwhile.

    Args:
        files: Tensors by name, for each file.
        tied: Mapping from each tied name to the name under which the tensor is written.

    Raises:
        CheckpointError: If a file, when read back, differs from the tensors.
    """
    num_bytes = sum(_make_spec(tensor).num_bytes for tensors in files.values() for tensor in tensors.values())
    with ParallelWriter(count_threads(num_bytes)) as writer:

        def compare_file(specs: Mapping[str, TensorSpec], file: RangedFile) -> None:
            check_specs(file.path, specs)
            for number in range(len(file.digests)):
                writer.add_task(partial(verify_range, file, number))

        for path, tensors in files.items():
            specs = order_widest_first({name: _make_spec(tensor) for name, tensor in tensors.items()})
            values = ((name, tensors[name]) for name in specs)
            writer.write(path, specs, values, tied, on_written=partial(compare_file, specs))


def _make_folder(path: str | Path) -> Path:
    folder = to_path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_stale(folder: Path, current: set[str]) -> None:
    """Remove files of earlier saves from the folder, so that a later load does not read them.

    Args:
        folder: Folder of the weights.
        current: Names of the files to keep.
    """
    stale = (SINGLE, INDEX, "model-*-of-*.safetensors", PICKLED)
    for path in list(folder.iterdir()):
        if path.name not in current and any(fnmatch(path.name, pattern) for pattern in stale):
            path.unlink()


# -------------------------------------------------------------------- configuration files, and the Hub


def write_configurations(model: torch.nn.Module, folder: Path, parts: Iterable[object] = ()) -> None:
    """Write a model's configuration files into a folder, and its tokenizer's files if the tokenizer is known.

    If the model has adapters, the files of its base are not written, because the folder contains only the adapters.

    Args:
        model: Model as the user created it, without wrappers.
        folder: Existing folder.
        parts: Tokenizers and processors with `save_pretrained`. Other objects, such as None, are skipped. Default: (),
            the tokenizer's files are copied from the folder or Hub cache from which the model was loaded.
    """
    config = getattr(model, "config", None)
    is_whole = not has_adapters(model)
    if is_whole and callable(getattr(config, "save_pretrained", None)):
        exported_config = copy.deepcopy(config)
        if not getattr(exported_config, "architectures", None):
            exported_config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        exported_config.save_pretrained(folder)  # type: ignore[union-attr]
    own = [part for part in parts if callable(getattr(part, "save_pretrained", None))]
    for part in own:
        part.save_pretrained(folder)  # type: ignore[attr-defined]
    settings = getattr(model, "generation_config", None)
    if is_whole and callable(getattr(settings, "save_pretrained", None)):
        try:
            settings.save_pretrained(folder)  # type: ignore[union-attr]
        except ValueError as error:  # contradictory settings must not make the save fail
            log.warning("the generation settings of %s were not written: %s", type(model).__name__, error)
    source = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    if not own and isinstance(source, str) and source:
        copy_files(_find_source_folder(source), folder, _TOKENIZER_PATTERNS)


def copy_files(source: Path | None, folder: Path, patterns: Iterable[str] = PATTERNS) -> list[Path]:
    """Copy files by name pattern from one folder to another, and return the paths of the copies.

    Args:
        source: Folder to copy from. Nothing is copied if it is None, does not exist, or is `folder`.
        folder: Folder to copy to.
        patterns: Name patterns of the files. Default: `PATTERNS`.
    """
    if source is None or not source.is_dir() or source.resolve() == folder.resolve():
        return []
    names = tuple(patterns)
    files = sorted(file for file in source.iterdir() if any(fnmatch(file.name, each) for each in names))
    copies = []
    for file in (each for each in files if each.is_file()):
        copies.append(folder / file.name)
        with file.open("rb") as source_file, open(copies[-1], "wb") as target_file:
            shutil.copyfileobj(source_file, target_file)
    return copies


def _find_source_folder(source: str) -> Path | None:
    """Return the folder from which a model was loaded, or None if there is no such folder.

    Args:
        source: Folder, or ID of a model on the Hub. For an ID, the folder in the Hub's cache is returned.
    """
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(source, "config.json")
    except Exception:  # not installed, or the source is not an ID
        return None
    return Path(config).parent if isinstance(config, str) else None


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether a model has adapters and a `save_pretrained` method that writes them, like PEFT's models."""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "save_pretrained", None))


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Create a model repository on the Hub if it does not exist, and upload a folder to it in one commit.

    Args:
        folder: Folder whose files are all uploaded.
        repo_id: ID of the repository: "name" or "owner/name".
        private: Whether a new repository is private. Default: None, the default of the repository's owner.
        token: Access token. Default: None, the token of `huggingface-cli login`, or HF_TOKEN.
        revision: Branch, which is created if missing. Default: None, the branch main.
        commit_message: Message of the commit.

    Returns:
        URL of the commit.

    Raises:
        ConfigError: If `repo_id` is empty.
        OptionalDependencyMissing: If huggingface_hub is not installed.
    """
    if not repo_id:
        raise ConfigError("push_to_hub needs a repository, such as 'owner/name'")
    hub = require("huggingface_hub", "push_to_hub uploads with", "huggingface_hub")
    api = hub.HfApi(token=token)
    name = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    commit = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=commit_message)
    return str(commit.commit_url)
