"""Test memory limits from control groups, read from files in the kernel's format."""

import pytest

from headway.common.control_groups import list_control_groups


@pytest.fixture
def root(tmp_path):
    """Return a function that writes files below a root folder and returns the root."""

    def write_files(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write_files


def test_version_2_lists_the_group_and_its_parents(root):
    found = list(list_control_groups(root({
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n", "sys/fs/cgroup/job/step/memory.current": "10\n",
        "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "900\n",
        "sys/fs/cgroup/job/memory.stat": "anon 500\ninactive_file 300\nactive_file 100\n",
        "sys/fs/cgroup/job/memory.peak": "950\n", "sys/fs/cgroup/job/memory.events": "max 7\noom 3\noom_kill 2\n",
    })))  # fmt: skip
    assert [group.folder.name for group in found] == ["step", "job", "cgroup"]
    step, job, top = found
    assert (step.limit, step.available_bytes, step.num_kills) == (None, None, None)
    assert (job.limit, job.used, job.peak, job.reclaimable, job.num_kills, job.available_bytes) == (
        1000,
        900,
        950,
        300,
        2,
        400,
    )
    assert (top.limit, top.used, top.available_bytes) == (None, None, None)


def test_version_1_counts_the_children_in(root):
    found = list(list_control_groups(root({
        "proc/self/cgroup": "3:cpu:/x\n4:cpuset,memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1000\n", "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "900\n",
        "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
        "sys/fs/cgroup/memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    })))  # fmt: skip
    own = found[0]
    assert (own.limit, own.available_bytes, own.num_kills, own.peak) == (1000, 400, 4, None)
    assert found[1].limit is None


def test_unmounted_path_falls_back_to_the_root_group(root):
    found = list(
        list_control_groups(root({"proc/self/cgroup": "0::/on/the/host\n", "sys/fs/cgroup/memory.max": "800\n"}))
    )
    assert [group.limit for group in found] == [800]


def test_available_bytes_are_0_above_the_limit(root):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5", "sys/fs/cgroup/memory.current": "9"}
    assert [group.available_bytes for group in list_control_groups(root(files))] == [0]


def test_without_control_groups_nothing_is_listed(tmp_path):
    assert not list(list_control_groups(tmp_path))
