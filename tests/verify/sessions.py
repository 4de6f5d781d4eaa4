"""Run `headway verify` in this process with servers shared by several tests: a second per script instead of ten."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        servers: Servers that fork the runs.
    """

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
    """Yield a verifier whose scripts work in copies of a folder.

    Args:
        folder: Empty folder, which is the current folder until the context ends.
    """
    before = os.getcwd()
    os.chdir(folder)
    servers = [ForkServer(), ForkServer()]
    try:
        yield Verifier(servers)
    finally:
        os.chdir(before)
        for each in servers:
            each.close()
