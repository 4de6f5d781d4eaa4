"""Run `headway verify` in this process with servers shared by several tests: a second per script instead of ten."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.cli.options import make_setting_options
from headway.cli.verify import make_options
from headway.verify.command import read_options
from headway.verify.proofs import PROOFS
from headway.verify.runs import ForkServer
from headway.verify.session import VerifySession
from headway.verify.verdict import Verdict

_NAMES = {"-n": "num_processes", "--strategy": "strategy", "--as": "run_as"}


@dataclass(frozen=True)
class Verifier:
    """Verification on the CPU with given servers.

    Args:
        folder: Folder that must be the current one while a script is verified: scripts work in copies of it.
        servers: Servers that fork the runs.
    """

    folder: Path
    servers: list[ForkServer]

    def verify(self, script: Path, *args: str, flags: str = "", **options: Any) -> dict[str, Verdict]:
        """Return the verdict of each proof by its name on the command line.

        Args:
            script: Path of the script.
            args: Arguments of the script.
            flags: Flags of the command line: `-n`, `--strategy` and `--as`.
            options: Other options of the command by name, such as `only`.
        """
        settings: dict[str, Any] = dict.fromkeys(str(each.name) for each in make_setting_options())
        tokens = shlex.split(flags)
        settings |= {_NAMES[flag]: value for flag, value in zip(tokens[::2], tokens[1::2], strict=True)}
        verify_options = read_options(
            make_options(str(script), args, **{"time_limit": 240.0, **settings, "cpu": True, **options})
        )
        with VerifySession(verify_options, lambda name: None, self.servers) as session:
            runs = session.run()
            return {word: PROOFS[word](runs) for word in PROOFS if word in verify_options.proofs}


@contextmanager
def open_verifier(folder: Path) -> Iterator[Verifier]:
    """Yield a verifier, and end its servers afterwards.

    Args:
        folder: Empty folder in which scripts are verified.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        servers = [ForkServer(), ForkServer()]
    try:
        yield Verifier(folder, servers)
    finally:
        for each in servers:
            each.close()
