"""The checks of each rank in `headway doctor`: versions, shared folder, clocks, and speed of the links."""

import platform
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.accelerator import Accelerator
from headway.cli.doctor import Finding, grade
from headway.common import env
from headway.version import __version__

_SMALL, _LARGE = 1, 4 * 2**20  # numbers of float32 elements

_NUM_SMALL, _NUM_LARGE = 50, 5  # numbers of timed all-reduces of each size

_APART = 1.0
"""Difference in seconds from which the clocks of two ranks are reported as different."""

_SLOW = 100.0
"""Bandwidth in MB/s below which an all-reduce is reported as slow. A 1 Gbit/s link has about this bandwidth."""

_FAR = 5.0
"""Duration in milliseconds above which a one-element all-reduce is reported as slow.

A local network completes several round trips in this time.
"""


@dataclass(frozen=True)
class RankLocation:
    """Properties of one rank that the doctor compares between ranks.

    Attributes:
        rank: Rank of the process.
        host: Host name.
        versions: Pairs of (name, version) for Headway, Python and torch.
        sees_nonce: Whether this rank's working folder contains a file that rank 0 created in rank 0's working folder.
        clock: Time on this rank's machine after a barrier, in seconds since 1970.
        interface: Value of GLOO_SOCKET_IFNAME, or "" if it is not set.
    """

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    sees_nonce: bool
    clock: float
    interface: str


def gather_locations(accelerator: Accelerator) -> list[RankLocation]:
    """Return the `RankLocation` of every rank, for example its host name, its versions and its clock.

    Every rank must call it.
    """
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


def compare_locations(places: Sequence[RankLocation]) -> Iterator[Finding]:
    """Compare the versions, working folders and clocks of all ranks, and yield the findings.

    Clocks are compared only if there are several hosts.
    """
    first = places[0]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(
        "ok",
        f"{len(places)} processes on {len(hosts)} host{'s' if len(hosts) > 1 else ''} have met: {', '.join(hosts)}",
    )
    others = [place for place in places if place.versions != first.versions]
    if others:
        versions = "; ".join(f"{place.host}: {_format_versions(place)}" for place in (first, others[0]))
        yield Finding(
            "bad",
            f"machines run different versions: {versions}",
            "install the same on all: results and hangs depend on it",
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
        yield _compare_clocks(places)


def _format_versions(place: RankLocation) -> str:
    return ", ".join(f"{name} {version}" for name, version in place.versions)


def _compare_clocks(places: Sequence[RankLocation]) -> Finding:
    early, late = (pick(places, key=lambda place: place.clock) for pick in (min, max))
    apart = late.clock - early.clock
    if apart < _APART:
        return Finding("ok", f"clocks are at most {apart:.2f} s apart (read right after a barrier)")
    description = f"the clocks of {early.host} and {late.host} are {apart:.1f} s apart"
    return Finding("note", description, "run NTP (chrony): times in logs and the order of failures mislead otherwise")


def measure_link(accelerator: Accelerator) -> tuple[float, float]:
    """Return the median latency of a one-element all-reduce in ms, and the bandwidth of a large all-reduce in MB/s.

    The bandwidth is the size of one rank's tensor divided by the median time. Every rank must call it.
    """

    def measure_seconds(length: int, repeats: int) -> float:
        tensor = torch.zeros(length, device=accelerator.device)
        times = []
        for _ in range(repeats + 2):
            accelerator.collectives.barrier()
            begun = time.perf_counter()
            accelerator.collectives.sum_in_place([tensor])
            tensor[0].item()  # wait for the device
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])  # the first two all-reduces are for warm-up

    return measure_seconds(_SMALL, _NUM_SMALL) * 1e3, _LARGE * 4 / measure_seconds(_LARGE, _NUM_LARGE) / 1e6


def judge_link(latency: float, rate: float, places: Sequence[RankLocation]) -> Iterator[Finding]:
    """Yield findings about the measured link, with likely causes if it is slow.

    Args:
        latency: Duration of a one-element all-reduce in milliseconds.
        rate: Bandwidth of a large all-reduce in MB/s.
        places: Location of every rank.
    """
    between = "machines" if len({place.host for place in places}) > 1 else "processes"
    way = f" over {places[0].interface}" if places[0].interface else ""
    if between == "machines":
        hint = "another interface may be nearer (name it in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), or the hosts are far apart"
    else:
        hint = "more processes than free cores: give fewer with -n, or fewer threads with --num_cpu_threads_per_process"
    yield grade(latency <= _FAR, f"an all-reduce of one number takes {latency:.2f} ms{way}", hint)
    if between == "machines":
        hint = (
            "as on a link of 1 Gbit/s or less: name a faster interface in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs), look "
            "for a lossy cable (`ip -s link`), and compress or accumulate gradients"
        )
    yield grade(rate >= _SLOW, f"an all-reduce of {_LARGE * 4 // 2**20} MiB runs at {rate:.0f} MB/s{way}", hint)


def check_fabric(num_bad: int) -> bool:
    """Compare all ranks, measure the link between them, and print the findings. Every rank must call it.

    Return True if neither these findings nor those of any machine are bad.

    Args:
        num_bad: Number of bad findings from the checks of this rank's machine, which have already run.
    """
    accelerator = Accelerator()
    places = gather_locations(accelerator)
    findings = list(compare_locations(places))
    if accelerator.num_processes > 1:
        findings += judge_link(*measure_link(accelerator), places)
    for finding in findings:
        accelerator.print(finding.format_text())
    before = max(accelerator.collectives.gather_objects(num_bad))
    num_bad = before + sum(finding.level == "bad" for finding in findings)
    num_notes = sum(finding.level == "note" for finding in findings)
    text = f"{num_bad} bad" if num_bad else "nothing is bad"
    accelerator.print(text + (f", {num_notes} to note between processes" if num_notes else ""))
    accelerator.end_training()
    return not num_bad
