"""torch.compile's cache artifacts in checkpoints, so that a resumed run on a new machine need not compile again.

Artifacts are code: they are written to torch's cache on the disk. The next compilation unpickles graphs and loads
kernels from there. Therefore they are loaded only by `resume("latest")`, only if the setting `keep_compiled` is on, and
only with a valid seal (HMAC-SHA256). The key of the seal belongs to the user and is not in the checkpoint. It is the
value of HEADWAY_SECRET, or else the content of a file in Headway's settings folder.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import torch

from headway.common import env
from headway.common.sealing import read_secret
from headway.common.untrusted import read_regular_file
from headway.core.checkpoint import folders
from headway.core.config.files import find_default_file
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

FILE = "compiled.bin"
"""Name of the file in a checkpoint: the seal (HMAC-SHA256), then the artifacts."""
_SEAL_BYTES = 32
_MAX_FILE_BYTES = 4 * 2**30
_KEY_FILE = "compile_cache.key"


def write_artifacts(staging: Path, collectives: Collectives) -> None:
    """Write rank 0's compilation artifacts into a checkpoint, if anything was compiled. Every rank must call it.

    If they cannot be exported or sealed, a warning is logged, and the checkpoint contains none.

    Args:
        staging: Staging directory of the save. Ranks that have no such directory write nothing.
        collectives: Collectives over all ranks.
    """
    content = collectives.broadcast_object(_export_artifacts() if collectives.rank == 0 else None)
    if content is None or not staging.is_dir():
        return
    path = staging / f".{FILE}-{collectives.rank}"
    path.write_bytes(content)
    os.replace(path, staging / FILE)  # ranks that share a disk replace each other's file, but all files are equal


def _export_artifacts() -> bytes | None:
    """Return this rank's compilation artifacts after their seal (HMAC-SHA256). Return None if there are none or on an error.

    The error is only logged, because the other ranks wait for this one, and the checkpoint is complete without them.
    """
    try:
        result = torch.compiler.save_cache_artifacts()
        if result is None:
            return None
        artifacts, _ = result
        return _compute_seal(artifacts) + artifacts
    except Exception as error:
        log.warning("compiled code is not saved in the checkpoint: %s: %s", type(error).__name__, error)
        return None


def load_artifacts(folder: Path) -> bool:
    """Load a checkpoint's compilation artifacts into this machine's caches. Call it before the first forward.

    Returns:
        Whether any artifacts were loaded. False if the checkpoint contains none. Also False, with a warning, if their
            file or this user's key cannot be read, or the seal (HMAC-SHA256) is not valid.
    """
    path = folders.find_store(folder).get_content_folder() / FILE
    if not path.exists():
        return False
    try:
        data = read_regular_file(path, _MAX_FILE_BYTES)
        seal, artifacts = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
        is_valid = hmac.compare_digest(seal, _compute_seal(artifacts))
    except (CheckpointError, OSError) as error:
        log.warning("compiled code was not loaded from the checkpoint: %s", error)
        return False
    if not is_valid:
        log.warning(
            "%s is ignored, because it was not sealed with this user's key: it is code, and may come from another person. Models "
            "are compiled again. If machines share no home directory, set HEADWAY_SECRET on all of them",
            path,
        )
        return False
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def _compute_seal(artifacts: bytes) -> bytes:
    return hmac.digest(read_secret() or _read_own_key(), artifacts, hashlib.sha256)


def _read_own_key() -> bytes:
    """Return the user's key for signing artifacts, read from a file in Headway's settings folder. Create the file if missing.

    If several processes create it at the same time, all of them use the first key.
    """
    path = find_default_file(env.copy_variables()).with_name(_KEY_FILE)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        new_file = path.with_name(f"{_KEY_FILE}-{secrets.token_hex(8)}")
        with open(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(new_file, path)  # unlike a rename, this never replaces the key of another process
        except FileExistsError:
            pass
        finally:
            new_file.unlink()
    return read_regular_file(path, 4096)
