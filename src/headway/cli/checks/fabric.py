"""What `headway doctor` runs on every rank: do the machines agree, share a folder and a clock, and how fast is the way between?"""

import argparse
import platform
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.accelerator import Accelerator
from headway.cli.doctor import Finding
from headway.common import env
from headway.version import __version__

_SMALL, _LARGE = 1, 4 * 2**20  # numbers of 4 bytes
_NUM_SMALL, _NUM_LARGE = 50, 5
_APART = 1.0
"""Seconds that clocks may differ by."""

_SLOW = 100.0
"""Megabytes a second below which an all-reduce is called slow: what a link of 1 Gbit/s carries."""

_FAR = 5.0
"""Milliseconds above which an all-reduce of one number is called late: several times a local network's round trip."""


@dataclass(frozen=True)
class RankLocation:
    """What a rank says of itself."""

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    sees_nonce: bool
    clock: float
    interface: str


def describe(accelerator: Accelerator) -> list[RankLocation]:
    """What all ranks say of themselves; collective."""
    collectives = accelerator.collectives
    nonce = collectives.broadcast_object(f".headway-doctor-{secrets.token_hex(8)}")
    if accelerator.is_main_process:
        Path(nonce).touch()
    collectives.barrier()
    sees_nonce = Path(nonce).exists()
    versions = {"headway": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    collectives.barrier()
    clock = time.time()  # all ranks have just left the barrier
    interface = env.get("GLOO_SOCKET_IFNAME") or ""
    place = RankLocation(
        accelerator.process_index, socket.gethostname(), tuple(versions.items()), sees_nonce, clock, interface
    )
    places = collectives.gather_objects(place)
    if accelerator.is_main_process:
        Path(nonce).unlink()
    return places


def compare(places: Sequence[RankLocation]) -> Iterator[Finding]:
    """What the ranks' words say together."""
    first = places[0]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(
        "ok",
        f"{len(places)} processes on {len(hosts)} host{'s' if len(hosts) > 1 else ''} have met: {', '.join(hosts)}",
    )
    others = [place for place in places if place.versions != first.versions]
    if others:
        said = "; ".join(f"{place.host}: {_versions(place)}" for place in (first, others[0]))
        yield Finding(
            "bad", f"machines run different versions: {said}", "install the same on all: results and hangs depend on it"
        )
    blind = list(dict.fromkeys(place.host for place in places if not place.sees_nonce))
    if blind:
        yield Finding(
            "note",
            f"the working folder {Path.cwd()} of {first.host} is not shared with {', '.join(blind)}",
            "start in a folder on a shared disk, or expect scripts, data and checkpoints to be apart on each machine",
        )
    elif len(hosts) > 1:
        yield Finding("ok", f"all machines see one working folder, {Path.cwd()}")
    if len(hosts) > 1:
        yield _clocks(places)


def _versions(place: RankLocation) -> str:
    return ", ".join(f"{name} {version}" for name, version in place.versions)


def _clocks(places: Sequence[RankLocation]) -> Finding:
    early, late = (pick(places, key=lambda place: place.clock) for pick in (min, max))
    apart = late.clock - early.clock
    said = f"clocks are at most {apart:.2f} s apart (read right after a barrier)"
    if apart < _APART:
        return Finding("ok", said)
    said = f"the clocks of {early.host} and {late.host} are {apart:.1f} s apart"
    return Finding("note", said, "run NTP (chrony): times in logs and the order of failures mislead otherwise")


def measure(accelerator: Accelerator) -> tuple[float, float]:
    """The median all-reduce: milliseconds for one number, megabytes a second for many (bytes of one rank / time)."""

    def seconds(length: int, repeats: int) -> float:
        tensor = torch.zeros(length, device=accelerator.device)
        times = []
        for _ in range(repeats + 2):
            accelerator.collectives.barrier()
            begun = time.perf_counter()
            accelerator.collectives.sum_in_place([tensor])
            tensor[0].item()  # waits for the device
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])

    return seconds(_SMALL, _NUM_SMALL) * 1e3, _LARGE * 4 / seconds(_LARGE, _NUM_LARGE) / 1e6


def judge(latency: float, rate: float, places: Sequence[RankLocation]) -> Iterator[Finding]:
    """Whether the measured way is good, and what may be wrong with it."""
    between = "machines" if len({place.host for place in places}) > 1 else "processes"
    way = f" over {places[0].interface}" if places[0].interface else ""
    late = latency > _FAR
    if between == "machines":
        hint = "another interface may be nearer (name it in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), or the hosts are far apart"
    else:
        hint = "more processes than free cores: give fewer with -n, or fewer threads with --num_cpu_threads_per_process"
    yield Finding(
        "note" if late else "ok", f"an all-reduce of one number takes {latency:.2f} ms{way}", hint if late else ""
    )
    slow = rate < _SLOW
    if between == "machines":
        hint = (
            "as on a link of 1 Gbit/s or less: name a faster interface in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs), look "
            "for a lossy cable (`ip -s link`), and compress or accumulate gradients"
        )
    size = _LARGE * 4 // 2**20
    yield Finding(
        "note" if slow else "ok", f"an all-reduce of {size} MiB runs at {rate:.0f} MB/s{way}", hint if slow else ""
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, measure, and exit 1 where something is bad here or was before."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bad", type=int, default=0, help="findings that are bad on this machine already")
    given = parser.parse_args(arguments)
    accelerator = Accelerator()
    places = describe(accelerator)
    findings = list(compare(places))
    if accelerator.num_processes > 1:
        findings += judge(*measure(accelerator), places)
    for finding in findings:
        accelerator.print(finding.text())
    before = max(accelerator.collectives.gather_objects(given.bad))
    num_bad = before + sum(finding.level == "bad" for finding in findings)
    num_notes = sum(finding.level == "note" for finding in findings)
    text = f"{num_bad} bad" if num_bad else "nothing is bad"
    accelerator.print(text + (f", {num_notes} to note between processes" if num_notes else ""))
    accelerator.end_training()
    sys.exit(1 if num_bad else 0)


if __name__ == "__main__":
    main()
