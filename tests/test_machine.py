"""Memory limits and machine descriptions read from made-up /proc and /sys trees; sizes and the budget line."""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from power_trees import write_tree
from threadpoolctl import threadpool_info

from edgekv.errors import ConfigError, MemoryBudgetError
from edgekv.machine import (
    available_memory_bytes,
    blas_threads,
    format_bytes,
    machine_info,
    parse_bytes,
    peak_rss_bytes,
    require_memory,
)

MIB = 2**20


def v2(folder, limit, used, stat="inactive_file 0\n"):
    base = f"sys/fs/cgroup{folder}"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": used, f"{base}/memory.stat": stat}


def v1(folder, limit, used, stat="total_inactive_file 0\n"):
    base = f"sys/fs/cgroup/memory{folder}"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"{base}/{name}": text for name, text in files.items()}


V1_UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", v2("/a/b", "max\n", "1000\n") | v2("/a", "3000\n", "1000\n"), 2000),
        ("0::/a/b\n", v2("/a/b", "5000\n", "4500\n") | v2("/a", "9000\n", "4500\n"), 500),
        ("0::/../other\n", v2("", "7000\n", "1000\n"), 6000),
        ("0::/a\n", v2("/a", "5000\n", "4000\n", "anon 9\ninactive_file 2500\nactive_file 9\n"), 3500),
        ("0::/a\n", v2("/a", "5000\n", "1000\n") | v2("/b", "1000\n", "900\n"), 4000),
        ("4:cpu,memory:/a/b\n0::/\n", v1("/a/b", "5000\n", "1000\n"), 4000),
        (
            "4:memory:/a/b\n",
            v1("/a/b", V1_UNLIMITED, "9\n") | v1("", "800\n", "300\n", "total_inactive_file 100\n"),
            600,
        ),
        ("4:memory:/docker/0123\n", v1("", "5000\n", "1000\n"), 4000),
    ],
)
def test_the_tightest_cgroup_limits(tmp_path, own, files, expected):
    root = write_tree(tmp_path, {"proc/self/cgroup": own} | files)
    assert available_memory_bytes(root) == expected


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/a\n"} | v2("/a", "max\n", "5\n"),
        {"proc/self/cgroup": "3:cpu:/a\n2:memory:/a\n"} | v1("/a", V1_UNLIMITED, "5\n"),
    ],
)
def test_without_a_limit_the_machine_decides(tmp_path, files):
    available = available_memory_bytes(write_tree(tmp_path, files))
    assert 64 * MIB < available < psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "cpu", "board"),
    [
        (
            {"proc/cpuinfo": "model\t: 1\nmodel name\t: ARMv8\n", "proc/device-tree/model": "Jetson Nano\0"},
            *("ARMv8", "Jetson Nano"),
        ),
        ({"proc/cpuinfo": "CPU part\t: 0xd0b\n\nModel\t\t: Raspberry Pi 5 B\n"}, None, "Raspberry Pi 5 B"),
        ({}, None, None),
    ],
)
def test_processor_and_board_names(tmp_path, files, cpu, board):
    info = machine_info(write_tree(tmp_path, files))
    assert (info["cpu"], info["board"]) == (cpu, board)


def test_the_peak_of_resident_memory_stays():
    process = psutil.Process()
    before, block = process.memory_info().rss, np.ones(96 * MIB, np.uint8)
    held = process.memory_info().rss
    assert held - before > 80 * MIB
    del block
    assert process.memory_info().rss < held - 80 * MIB
    assert peak_rss_bytes() > held - 8 * MIB


def test_a_budget_that_does_not_fit_is_explained_in_one_line():
    parts = {"weights": 3686 * MIB, "kv cache": 4096 * MIB, "scratch": 1536 * MIB}
    expected = "needs 9.1 GiB (weights 3.6 GiB, kv cache 4.0 GiB, scratch 1.5 GiB) but 7.2 GiB is available; "
    with pytest.raises(MemoryBudgetError, match=f"^{re.escape(expected)}lower `ctx`"):
        require_memory(parts, 7373 * MIB)


def test_bytes_for_people():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", MIB - 1: "1.0 MiB", 5 * MIB: "5.0 MiB"}
    assert {n: format_bytes(n) for n in sizes} == sizes
    assert format_bytes(2**50) == "1024.0 TiB"
    texts = {"4096": 4096, "12B": 12, "300M": 300 * MIB, "300mb": 300 * MIB, "1.5 GiB": 1536 * MIB, "2Ki": 2048}
    texts |= {" 1T ": 2**40, "9007199254740993": 9007199254740993}
    assert {text: parse_bytes(text) for text in texts} == texts
    for text in ("", "G", "-1", "1.5.5G", "1e9", "3X", "1 000"):
        with pytest.raises(ConfigError, match="accepted: bytes"):
            parse_bytes(text)


def test_blas_has_its_threads_back_after_statements_that_overlap() -> None:
    """Each thread's latest that has not ended counts, in whatever order they end; of those the fewest."""

    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    before, seen = threads(), []
    first, second, third = (contextlib.ExitStack() for _ in range(3))
    for each, n in (first, 1), (second, 2), (third, 1):
        each.enter_context(blas_threads(n))
        seen.append(threads())
    for each in second, first, third:
        each.close()
        seen.append(threads())
    assert seen == [{1}, {2}, {1}, {1}, {1}, before]

    def another(n: int) -> set[int]:
        with blas_threads(n):
            return threads()

    for own, others in (2, 1), (1, 2):  # a prompt lets a pass go first; whose product has one thread keeps it
        with blas_threads(own), ThreadPoolExecutor(1) as pool:
            assert (pool.submit(another, others).result(), threads()) == ({1}, {own})
    assert threads() == before
