"""tools/arm_wheels.py: which glibc a wheel needs, and what a lock file says. Resolving needs a network."""

import arm_wheels
import pytest

LOCK = """
lock-version = "1.0"

[[packages]]
name = "numpy"
version = "2.5.5"
wheels = [{ url = "https://host/numpy-2.5.5-cp314-cp314-manylinux_2_27_aarch64.whl", size = 15 }]

[[packages]]
name = "tqdm"
version = "4.66.0"
wheels = [
    { url = "https://host/tqdm-4.66.0-py3-none-any.whl", upload-time = 2023-08-11, size = 70, hashes = {} },
]
"""


@pytest.mark.parametrize(
    ("wheel", "glibc"),
    [
        ("a-1-py3-none-any.whl", (0, 0)),
        ("a-1-cp311-cp311-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", (2, 17)),
        ("a-1-cp311-cp311-manylinux2014_aarch64.whl", (2, 17)),
        ("a-1-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", (2, 27)),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", None),
        ("a-1-cp311-cp311-musllinux_1_2_aarch64.whl", None),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", None),
    ],
)
def test_the_tags_say_which_glibc_a_wheel_needs(wheel: str, glibc: tuple[int, int] | None) -> None:
    assert arm_wheels.glibc_of(wheel) == glibc


def test_a_lock_is_versions_glibc_and_bytes() -> None:
    found = arm_wheels.read_lock(LOCK)
    assert found.versions == {"numpy": "2.5.5", "tqdm": "4.66.0"}
    assert found.glibc == {"numpy": (2, 27), "tqdm": (0, 0)}
    assert (found.n_bytes, found.failure) == (85, "")


def test_a_package_without_a_wheel_for_arm_is_named() -> None:
    found = arm_wheels.read_lock(LOCK.replace("aarch64", "x86_64"))
    assert found.failure == "numpy 2.5.5 has no wheel for aarch64"


def test_what_uv_says_without_a_network_is_told_from_a_missing_wheel() -> None:
    assert arm_wheels.OFFLINE.search("error: Failed to fetch: `https://host`\n  Caused by: dns error")
    assert not arm_wheels.OFFLINE.search("Because numba==0.1 has no wheels with a matching Python ABI tag")


def test_the_oldest_system_is_resolved_for() -> None:
    assert arm_wheels.OLDEST == (2, 35)
    assert {python for _, python in arm_wheels.SYSTEMS.values()} <= set(arm_wheels.PYTHONS)
