"""tools/arm_count.py: what the plugin's lines mean. The counts themselves need an emulator."""

import pathlib
import shutil
import subprocess

import arm_count
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

EMPTY = "counts 640 64" + " 0 0" * 7
WHOLE = "counts 8810 1" + " 0 0" * 7
SPLIT = "counts 1000 20 6100 10 2050 5 150 5 300 20" + " 0 0" * 3  # of part 4 nothing is run in a whole token


def test_a_line_is_instructions_and_beginnings_of_eight_parts() -> None:
    (line,) = arm_count.read(f"something\n{SPLIT}\nelse\n")
    assert line[:3] == [(1000, 20), (6100, 10), (2050, 5)]
    assert len(line) == 8


def test_marks_are_subtracted_and_the_parts_make_the_whole() -> None:
    empty, whole, split = arm_count.read("\n".join([EMPTY, WHOLE, SPLIT]))
    found = arm_count.by_part(whole, split, empty)
    # Without marks 800, 6000, 2000 and 100, 100 more than the whole: five for each of 20 marked operations.
    assert found == {"linear": 5950, "attention": 1975, "rope": 75, "rest": 800, "whole": 8800}


def test_the_plugin_and_the_guests_agree_on_the_mark() -> None:
    tools = ROOT / "tools"
    for name in ("arm_count_plugin.c", "arm_count_llama.cpp", "arm_count_token.py"):
        text = (tools / name).read_text(encoding="utf-8")
        assert "0x65646765" in text
        assert "PRINT = 255" in text or "PRINT = 141, 0x65646765, 255" in text


def test_the_plugin_compiles(tmp_path: pathlib.Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    command = ["gcc", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", tmp_path / "parts.so"]
    subprocess.run([*command, ROOT / "tools" / "arm_count_plugin.c"], check=True)
