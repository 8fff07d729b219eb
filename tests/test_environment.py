"""How much memory a process may use: the machine's, or what a container or scheduler leaves of it."""

import pytest

from t2r.environment import host_memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """Writes files of a machine with 64 GiB available under tmp_path: a function of {path: text}."""

    def write(files):
        for path, text in {"proc/meminfo": f"MemTotal: 99999 kB\nMemAvailable: {64 * 2**20} kB\n", **files}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(str(text))
        return tmp_path

    return write


def group(folder, most, used, copies=0, version=2):
    """The files of a control group, of which `copies` bytes are copies of files."""
    limit, usage, prefix = {
        2: ("memory.max", "memory.current", ""),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }[version]
    stat = f"anon 7\n{prefix}inactive_file {copies - 5}\n{prefix}active_file 5\n"
    return {f"{folder}/{limit}": f"{most}\n", f"{folder}/{usage}": f"{used}\n", f"{folder}/memory.stat": stat}


def test_without_limits_the_machine_s_memory_is_free(machine):
    assert host_memory(machine({})) == 64 * GIB
    unlimited = {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "max", 9 * GIB)}
    assert host_memory(machine(unlimited)) == 64 * GIB


def test_the_smallest_limit_of_all_groups_counts(machine):
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        **group("sys/fs/cgroup/job", 8 * GIB, 6 * GIB, copies=GIB),
        **group("sys/fs/cgroup/job/step", "max", 2 * GIB),
    }
    assert host_memory(machine(files)) == 3 * GIB
    files |= group("sys/fs/cgroup/job/step", 4 * GIB, 2 * GIB)
    assert host_memory(machine(files)) == 2 * GIB
    files |= group("sys/fs/cgroup/job", 8 * GIB, 9 * GIB)
    assert host_memory(machine(files)) == 0


def test_version_1_and_containers_that_do_not_see_their_group(machine):
    lines = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n"
    files = {"proc/self/cgroup": lines, **group("sys/fs/cgroup/memory", 2 * GIB, GIB, copies=GIB // 2, version=1)}
    assert host_memory(machine(files)) == 1.5 * GIB
    files |= group("sys/fs/cgroup/memory/docker/abc", GIB, GIB // 4, version=1)
    assert host_memory(machine(files)) == 0.75 * GIB


def test_where_the_system_reports_nothing_nothing_is_known(tmp_path):
    assert host_memory(tmp_path) is None
