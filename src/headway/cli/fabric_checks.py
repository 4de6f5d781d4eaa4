"""The checks of each rank in `headway doctor`: versions, shared folder, clocks, and speed of the links."""

import platform
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from headway.accelerator import Accelerator
from headway.cli.machine_checks import Finding, make_finding
from headway.common import env
from headway.common.text import join_names
from headway.version import __version__

_SMALL_LENGTH, _LARGE_LENGTH = 1, 4 * 2**20  # numbers of float32 elements in a timed tensor

_NUM_SMALL_REPEATS, _NUM_LARGE_REPEATS = 50, 5  # numbers of timed all-reduces of each size

_MAX_CLOCK_DIFFERENCE = 1.0
"""Difference in seconds from which the clocks of two ranks are reported as different."""

_MIN_BANDWIDTH = 100.0
"""Bandwidth in MB/s below which an all-reduce is reported as slow. A 1 Gbit/s link has about this bandwidth."""

_MAX_LATENCY = 5.0
"""Duration in milliseconds above which a one-element all-reduce is reported as slow.

A local network completes several round trips in this time.
"""


@dataclass(frozen=True)
class RankFacts:
    """Properties of one rank that the doctor compares between ranks.

    Attributes:
        rank: Rank of the process.
        host: Host name.
        versions: Pairs of (name, version) for Headway, Python and torch.
        shares_working_folder: Whether this rank's working folder contains a file that rank 0 created in rank 0's
            working folder.
        clock: Time on this rank's machine after a barrier, in seconds since 1970.
        interface: Value of GLOO_SOCKET_IFNAME, or "" if it is not set.
        num_gpus: Number of NVIDIA or AMD GPUs that this rank sees. 0 if it computes on another device.
        isolated_pairs: Pairs of these GPUs, as "0-1", that cannot access each other's memory.
    """

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    shares_working_folder: bool
    clock: float
    interface: str
    num_gpus: int = 0
    isolated_pairs: tuple[str, ...] = ()


def gather_rank_facts(accelerator: Accelerator) -> list[RankFacts]:
    """Return the `RankFacts` of every rank, for example its host name, its versions and its clock.

    Every rank must call it.
    """
    collectives = accelerator.collectives
    marker_file = collectives.broadcast_object(f".headway-doctor-{secrets.token_hex(8)}")
    if accelerator.is_main_process:
        Path(marker_file).touch()
    collectives.barrier()
    shares_working_folder = Path(marker_file).exists()
    versions = {"headway": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    collectives.barrier()
    clock = time.time()  # all ranks have just left the barrier
    interface = env.get("GLOO_SOCKET_IFNAME") or ""
    facts = RankFacts(
        accelerator.process_index,
        socket.gethostname(),
        tuple(versions.items()),
        shares_working_folder,
        clock,
        interface,
        *find_isolated_gpus(accelerator.device),
    )
    facts_by_rank = collectives.gather_objects(facts)
    if accelerator.is_main_process:
        Path(marker_file).unlink()
    return facts_by_rank


def find_isolated_gpus(device: torch.device) -> tuple[int, tuple[str, ...]]:
    """Return the number of visible GPUs, and the pairs without peer access in both directions, such as "0-1".

    Args:
        device: Device of this process. The result is (0, ()) unless it is a CUDA or ROCm GPU.
    """
    if device.type != "cuda":
        return 0, ()
    count = torch.cuda.device_count()
    pairs = combinations(range(count), 2)
    return count, tuple(
        f"{first}-{second}"
        for first, second in pairs
        if not (torch.cuda.can_device_access_peer(first, second) and torch.cuda.can_device_access_peer(second, first))
    )


def check_peer_access(facts_by_rank: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield a finding for each host with several GPUs: whether they can access each other's memory.

    If a process does not see all GPUs of its host, the pairs of the first process count.

    Args:
        facts_by_rank: Facts about every rank, in rank order.
    """
    facts_by_host = {facts.host: facts for facts in reversed(facts_by_rank)}
    for host, facts in sorted(facts_by_host.items()):
        if facts.num_gpus > 1:
            pairs = join_names(facts.isolated_pairs, 6)
            yield make_finding(
                not facts.isolated_pairs,
                f"{facts.num_gpus} GPUs of {host} have direct access to each other's memory"
                if not facts.isolated_pairs
                else f"GPUs of {host} without direct access to each other's memory: {pairs}",
                "NCCL copies between them through host memory, which is slower. Most GeForce cards lack this access; in virtual "
                "machines, ACS and the IOMMU can prevent it",
            )


def compare_rank_facts(facts_by_rank: Sequence[RankFacts]) -> Iterator[Finding]:
    """Compare the versions, working folders and clocks of all ranks, and yield the findings.

    Clocks are compared only if there are several hosts.
    """
    reference = facts_by_rank[0]
    hosts = list(dict.fromkeys(facts.host for facts in facts_by_rank))
    yield Finding(
        "ok",
        f"{len(facts_by_rank)} processes on {len(hosts)} host{'s' if len(hosts) > 1 else ''} have met: {', '.join(hosts)}",
    )
    different = [facts for facts in facts_by_rank if facts.versions != reference.versions]
    if different:
        versions = "; ".join(f"{facts.host}: {_format_versions(facts)}" for facts in (reference, different[0]))
        yield Finding(
            "bad",
            f"machines run different versions: {versions}",
            "install the same on all: results and hangs depend on it",
        )
    hosts_without_folder = list(dict.fromkeys(facts.host for facts in facts_by_rank if not facts.shares_working_folder))
    if hosts_without_folder:
        yield Finding(
            "note",
            f"the working folder {Path.cwd()} of {reference.host} is not shared with {', '.join(hosts_without_folder)}",
            "start in a folder on a shared disk, or expect scripts, data and checkpoints to be apart on each machine",
        )
    elif len(hosts) > 1:
        yield Finding("ok", f"all machines see one working folder, {Path.cwd()}")
    if len(hosts) > 1:
        yield _compare_clocks(facts_by_rank)
    yield from check_peer_access(facts_by_rank)


def _format_versions(facts: RankFacts) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.versions)


def _compare_clocks(facts_by_rank: Sequence[RankFacts]) -> Finding:
    """Return a finding on the difference between the clocks of the ranks' machines.

    Args:
        facts_by_rank: Facts of each rank, with its clock in seconds, read right after a barrier.
    """
    earliest = min(facts_by_rank, key=lambda facts: facts.clock)
    latest = max(facts_by_rank, key=lambda facts: facts.clock)
    difference = latest.clock - earliest.clock
    if difference < _MAX_CLOCK_DIFFERENCE:
        return Finding("ok", f"clocks are at most {difference:.2f} s apart (read right after a barrier)")
    description = f"the clocks of {earliest.host} and {latest.host} are {difference:.1f} s apart"
    return Finding("note", description, "run NTP (chrony): times in logs and the order of failures mislead otherwise")


def measure_link(accelerator: Accelerator) -> tuple[float, float]:
    """Return the median latency of a one-element all-reduce in ms, and the bandwidth of a large all-reduce in MB/s.

    The bandwidth is the size of one rank's tensor divided by the median time. Every rank must call it.
    """

    def measure_seconds(length: int, repeats: int) -> float:
        """Return the median seconds of `repeats` all-reduces of `length` float32 values."""
        tensor = torch.zeros(length, device=accelerator.device)
        times = []
        for _ in range(repeats + 2):
            accelerator.collectives.barrier()
            started = time.perf_counter()
            accelerator.collectives.sum_in_place([tensor])
            tensor[0].item()  # wait for the device
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])  # the first two all-reduces are for warm-up

    latency = measure_seconds(_SMALL_LENGTH, _NUM_SMALL_REPEATS) * 1e3
    seconds = measure_seconds(_LARGE_LENGTH, _NUM_LARGE_REPEATS)
    return latency, _LARGE_LENGTH * 4 / seconds / 1e6


def check_link(latency: float, bandwidth: float, facts_by_rank: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield findings about the measured link, with likely causes if it is slow.

    Args:
        latency: Duration of a one-element all-reduce in milliseconds.
        bandwidth: Bandwidth of a large all-reduce in MB/s.
        facts_by_rank: Facts about every rank, in rank order.
    """
    has_several_hosts = len({facts.host for facts in facts_by_rank}) > 1
    interface_note = f" over {facts_by_rank[0].interface}" if facts_by_rank[0].interface else ""
    if has_several_hosts:
        hint = "another interface may be nearer (name it in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), or the hosts are far apart"
    else:
        hint = "more processes than free cores: give fewer with -n, or fewer threads with --num_cpu_threads_per_process"
    yield make_finding(
        latency <= _MAX_LATENCY, f"an all-reduce of one number takes {latency:.2f} ms{interface_note}", hint
    )
    if has_several_hosts:
        hint = (
            "as on a link of 1 Gbit/s or less: name a faster interface in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs), look "
            "for a lossy cable (`ip -s link`), and compress or accumulate gradients"
        )
    yield make_finding(
        bandwidth >= _MIN_BANDWIDTH,
        f"an all-reduce of {_LARGE_LENGTH * 4 // 2**20} MiB runs at {bandwidth:.0f} MB/s{interface_note}",
        hint,
    )


def check_fabric(num_bad: int) -> bool:
    """Compare all ranks, measure the link between them, and print the findings. Every rank must call it.

    Only rank 0 prints. Return True if neither these findings nor those of any machine are bad.

    Args:
        num_bad: Number of bad findings from the checks of this rank's machine, which have already run.
    """
    accelerator = Accelerator()
    facts_by_rank = gather_rank_facts(accelerator)
    findings = list(compare_rank_facts(facts_by_rank))
    if accelerator.num_processes > 1:
        findings += check_link(*measure_link(accelerator), facts_by_rank)
    for finding in findings:
        accelerator.print(finding.format_text())
    before = max(accelerator.collectives.gather_objects(num_bad))
    num_bad = before + sum(finding.level == "bad" for finding in findings)
    num_notes = sum(finding.level == "note" for finding in findings)
    text = f"{num_bad} bad" if num_bad else "nothing is bad"
    accelerator.print(text + (f", {num_notes} to note between processes" if num_notes else ""))
    accelerator.end_training()
    return not num_bad
