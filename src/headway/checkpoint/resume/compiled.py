"""torch.compile's artifacts, kept in checkpoints, so that a run on a new machine does not compile again.

Torch's artifacts are code: they are put into its cache on the disk, from which the next compilation unpickles graphs and loads
kernels. So they are taken up by `resume("latest")` alone, where the setting asks for them, and only if they carry the seal
(HMAC-SHA256) of a key that lies with the user and not with the checkpoint: HEADWAY_SECRET, else a file beside Headway's settings.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import torch

from headway.checkpoint import folders
from headway.common import env
from headway.common.untrusted import read_regular, users_secret
from headway.config.files import default_file
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives

log = get_logger(__name__)

FILE = "compiled.bin"
_KEY, _SEAL, _MOST = "compile_cache.key", 32, 4 * 2**30


def write(staging: Path, collectives: Collectives) -> None:
    """Put rank 0's artifacts, where anything was compiled, into a checkpoint; every rank calls it."""
    made: bytes | None = None
    if collectives.rank == 0 and (saved := torch.compiler.save_cache_artifacts()) is not None:
        made = _seal(saved[0]) + saved[0]
    made = collectives.broadcast_object(made)
    if made is None or not staging.is_dir():
        return
    path = staging / f".{FILE}-{collectives.rank}"
    path.write_bytes(made)
    os.replace(path, staging / FILE)  # ranks of one disk write the same


def load(folder: Path) -> bool:
    """Put a checkpoint's artifacts into this machine's caches, before the first forward; says whether it did."""
    path = folders.store_of(folder).contents() / FILE
    if not path.exists():
        return False
    try:
        data = read_regular(path, _MOST)
    except CheckpointError as error:
        log.warning("compiled code was not loaded from the checkpoint: %s", error)
        return False
    seal, artifacts = data[:_SEAL], data[_SEAL:]
    if not hmac.compare_digest(seal, _seal(artifacts)):
        log.warning(
            "%s is ignored, because it was not sealed with this user's key: it is code, and may come from somebody else. Models "
            "are compiled again. If machines share no home directory, set HEADWAY_SECRET on all of them",
            path,
        )
        return False
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def _seal(artifacts: bytes) -> bytes:
    return hmac.digest(users_secret() or _own_key(), artifacts, hashlib.sha256)


def _own_key() -> bytes:
    """The key in the user's home, made where there is none; of several processes that make one, the first counts."""
    path = default_file(env.snapshot()).with_name(_KEY)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_name(f"{_KEY}-{secrets.token_hex(8)}")
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(made, path)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    return read_regular(path, 4096)
