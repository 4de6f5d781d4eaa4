"""Weights for other programs: plain safetensors files, what `from_pretrained` needs beside them, and the Hugging Face Hub.

Files are written beside the old ones, then renamed.

Nothing here knows transformers or PEFT: a model has a `config` and a `generation_config` that can write themselves, or adapters
and a `save_pretrained` of its own. The files of a tokenizer come from whoever has it, or from where the model was loaded from: its
folder, or the cache of the Hub (nothing is downloaded).
"""

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from headway.common.atomic import replacing, write_text
from headway.common.object_path import to_path, writable
from headway.common.optional import require
from headway.common.text import parse_bytes
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger
from headway.weights.files import map_safetensors
from headway.weights.pieces import memory_of
from headway.weights.shards import TensorSpec, is_same, raw_bytes, widest_first, write_file

log = get_logger("headway.weights.published")  # apart: HEADWAY_LOG_LEVEL lets no rank tell of each file that it writes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PATTERNS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*.model", "chat_template.*", "preprocessor_config.json",
    "processor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Names of the files that say what a folder's weights are of."""
_OF_TOKENIZERS = PATTERNS[3:]


class LazyFullTensor(Protocol):
    """A tensor that is not in memory as a whole.

    Attributes:
        shape: of the whole.
        dtype: of its values.
    """

    shape: torch.Size
    dtype: torch.dtype

    def whole(self) -> torch.Tensor:
        """All of it."""


def untied(tensors: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split tensors into those to write and {tied name: the name that is written}.

    Names that hold the very same memory in the same layout are tied; views that merely share a buffer are not.
    """
    kept: dict[str, Any] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        key = memory_of(tensor)
        if prod(tensor.shape) and key in owners:
            tied[name] = owners[key]
        else:
            owners[key] = name
            kept[name] = tensor
    return kept, tied


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """Names in order, cut into shards of at most `max_shard_size` bytes; a tensor larger than that gets one of its own.

    The cuts are those of huggingface_hub's split_torch_state_dict_into_shards, by the same rules: a tensor that is too
    large stands before the shard that was being filled when it came, and that shard is filled further.
    """
    shards: list[list[str]] = []
    filling: list[str] = []
    room = max_shard_size
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if size > room:
            shards.append(filling)
            filling, room = [], max_shard_size
        filling.append(name)
        room -= size
    return [*shards, filling] if filling or not shards else shards


def save_weights(
    tensors: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]], folder: str | Path, max_shard_size: int | str
) -> list[Path]:
    """Write the tensors under their names and return the files.

    Args:
        tensors: (name, tensor) pairs; what is not in memory yet is put together when its turn comes.
        folder: made where missing.
        max_shard_size: bytes, or text such as "10GB".

    Raises:
        ConfigError: the folder is a file.
        CheckpointError: a file does not hold what was written to it; the folder is as it was.
    """
    place = _folder(folder)
    with writable(place) as local:
        files = [place / name for name in _save(tensors, local, max_shard_size)]
    _remove_stale(place, {file.name for file in files})
    return files


def _save(tensors: Iterable[tuple[str, Any]], folder: Path, max_shard_size: int | str) -> list[str]:
    """Write the files; returns their names."""
    kept, tied = untied(tensors)
    shards = _shards_of(kept, max_shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    with ExitStack() as stack:  # no file is replaced before all are written
        for file, shard in zip(names, shards):
            logging.getLogger(__name__).info("writing %s", folder / file)
            staged = stack.enter_context(replacing(folder / file))
            part = {name: kept[name] for name in shard}
            _verify(staged, part, _write(staged, part, tied))
    if len(shards) > 1:
        total = sum(_spec(tensor).num_bytes for tensor in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        names.append(INDEX)
    return names


def save_pickled(state: dict[str, torch.Tensor], folder: str | Path) -> Path:
    """Write the tensors with torch.save as one `pytorch_model.bin`, in place of earlier saves in the folder.

    Raises:
        ConfigError: the folder is a file.
    """
    place = _folder(folder)
    save_object(state, place / PICKLED)
    _remove_stale(place, {PICKLED})
    return place / PICKLED


def save_object(obj: Any, path: str | Path, safe_serialization: bool = False) -> None:
    """Write an object with torch.save, or a dict of tensors with safetensors; a reader sees the old file or the new.

    Raises:
        ConfigError: safetensors was asked for, and this is not a dict of tensors.
    """
    if safe_serialization and not _is_state(obj):
        raise ConfigError(
            f"safe_serialization=True got a {type(obj).__name__}; safetensors holds a dict of names and tensors. Pass "
            "safe_serialization=False for other objects"
        )
    path = to_path(path)
    with writable(path.parent) as folder, replacing(folder / path.name) as staged:
        if safe_serialization:
            _write(staged, *untied(obj.items()))
        else:
            torch.save(obj, staged)


def _is_state(obj: Any) -> bool:
    return isinstance(obj, Mapping) and all(isinstance(value, torch.Tensor) for value in obj.values())


def _shards_of(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[list[str]]:
    return plan_shards({name: _spec(each).num_bytes for name, each in tensors.items()}, parse_bytes(max_shard_size))


def order_of(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[str]:
    """The names in the order in which `save_weights` writes them; none of them is tied to another."""
    shards = _shards_of(tensors, max_shard_size)
    return [name for shard in shards for name in widest_first({each: _spec(tensors[each]) for each in shard})]


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _write(path: Path, tensors: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, str]:
    """Write a file; returns the hashes of the values that were put together for it."""
    specs = widest_first({name: _spec(tensor) for name, tensor in tensors.items()})
    hashes: dict[str, str] = {}

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in specs:
            tensor = tensors[name]
            if not isinstance(tensor, torch.Tensor):
                tensor = tensor.whole()
                hashes[name] = _hash(tensor)
            yield name, tensor
            del tensor  # before the next one is put together

    write_file(path, specs, values(), tied)
    return hashes


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128(memoryview(raw_bytes(tensor).numpy())).hexdigest()  # type: ignore[arg-type]


def _verify(path: Path, wanted: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Does the file hold these tensors, bit by bit?"""
    stored, _ = map_safetensors(path)

    def is_held(name: str) -> bool:
        if name not in stored:
            return False
        tensor = stored[name].tensor()
        return _hash(tensor) == hashes[name] if name in hashes else is_same(tensor, wanted[name])

    differing = [name for name in wanted if not is_held(name)]
    if differing or len(stored) != len(wanted):
        raise CheckpointError(
            f"{path} does not hold what was written ({', '.join(differing[:3])}); nothing was replaced. Save to another disk"
        )


def _folder(path: str | Path) -> Path:
    folder = to_path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_stale(folder: Path, current: set[str]) -> None:
    """An earlier save in the same folder must not be found by a later load."""
    stale = (SINGLE, INDEX, "model-*-of-*.safetensors", PICKLED)
    for path in list(folder.iterdir()):
        if path.name not in current and any(fnmatch(path.name, pattern) for pattern in stale):
            path.unlink()


# -------------------------------------------------------------------- what describes them, and the Hub


def describe(model: torch.nn.Module, folder: Path, parts: Iterable[object] = ()) -> None:
    """Write the model's configurations, and what is known of its tokenizer, into a folder.

    Args:
        model: as the user made it.
        folder: is there.
        parts: tokenizers and processors that write themselves (`save_pretrained`); None among them is passed over.
    """
    config = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        told = copy.deepcopy(config)
        if not getattr(told, "architectures", None):
            told.architectures = [type(model).__name__]  # type: ignore[union-attr]
        told.save_pretrained(folder)  # type: ignore[union-attr]
    own = [part for part in parts if callable(getattr(part, "save_pretrained", None))]
    for part in own:
        part.save_pretrained(folder)  # type: ignore[attr-defined]
    settings = getattr(model, "generation_config", None)
    if callable(getattr(settings, "save_pretrained", None)):
        try:
            settings.save_pretrained(folder)  # type: ignore[union-attr]
        except ValueError as error:  # settings that contradict each other; a save must not fail for them
            log.warning("the generation settings of %s were not written: %s", type(model).__name__, error)
    source = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    if not own and isinstance(source, str) and source:
        copy_files(_home_of(source), folder, _OF_TOKENIZERS)


def copy_files(source: Path | None, folder: Path, patterns: Iterable[str] = PATTERNS) -> list[Path]:
    """Copy the files of these names from a folder, None or one that is not there; returns the copies."""
    if source is None or not source.is_dir() or source.resolve() == folder.resolve():
        return []
    wanted = tuple(patterns)
    found = sorted(file for file in source.iterdir() if any(fnmatch(file.name, each) for each in wanted))
    copies = []
    for file in (each for each in found if each.is_file()):
        copies.append(folder / file.name)
        with file.open("rb") as source_file, open(copies[-1], "wb") as made:
            shutil.copyfileobj(source_file, made)
    return copies


def _home_of(source: str) -> Path | None:
    """The folder that a model was loaded from, in the cache where it was an id."""
    if Path(source).is_dir():
        return Path(source)
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(source, "config.json")
    except Exception:  # not installed, or no id at all
        return None
    return Path(config).parent if isinstance(config, str) else None


def has_adapters(model: torch.nn.Module) -> bool:
    """Does it write its adapters itself, as PEFT's models do?"""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "save_pretrained", None))


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Make a model repository on the Hub where there is none, and upload a folder into it in one commit.

    Args:
        folder: of files; all of them are uploaded.
        repo_id: "name" or "owner/name".
        private: of a new repository; None: what the owner's settings say.
        token: None: that of `huggingface-cli login`, or HF_TOKEN.
        revision: a branch, made where missing; None: main.
        commit_message: of the commit.

    Returns:
        The commit's URL.

    Raises:
        ConfigError: no name.
        OptionalDependencyMissing: huggingface_hub is not installed.
    """
    if not repo_id:
        raise ConfigError("push_to_hub needs a repository, such as 'owner/name'")
    hub = require("huggingface_hub", "push_to_hub uploads with", "huggingface_hub")
    api = hub.HfApi(token=token)
    name = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    made = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=commit_message)
    return str(made.commit_url)
