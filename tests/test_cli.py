"""The command line as a user meets it: in processes of its own, its errors one line each with exit 2, TAB."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import golden_cases
import pytest
from helpers import SCHEMES

from edgekv import SamplingParams
from edgekv.cli import COMMANDS, main, parser
from edgekv.cli.options import FLAGS, in_flags
from edgekv.engine.loading import Options
from edgekv.errors import EdgeKVError


def edgekv(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "edgekv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=300, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint("llama31", tmp_path_factory.mktemp("model"))


@pytest.fixture
def stories(shared: pathlib.Path) -> pathlib.Path:
    return shared / "models" / "stories260K"


def test_run_streams_text_and_reports(stories: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.json"
    given = ["--model", stories, "--prompt-file", "-", "--max-new-tokens", 30, "--json", report, "--greedy"]
    done = edgekv("run", *given, input=b"Once upon a time")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith(", there was a little girl named Lily")
    lines = done.stderr.decode().splitlines()
    topics = {line.split()[0] for line in lines}
    assert {"model", "text", "memory", "stopped"} <= topics
    facts = json.loads(report.read_text())
    assert facts["decode_tokens"] == 29
    assert facts["settings"]["kv"] == "dense:dtype=f16"
    assert facts["machine"]["versions"]["edgekv"]
    for name in ("latency_median_ms", "latency_p95_ms", "prefill_tokens_per_s", "achieved_gb_per_s"):
        assert facts[name] > 0


def test_same_seed_same_text(stories: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--model", str(stories), "--prompt", "Tom", "--temperature", "1", "--max-new-tokens", "40"]
    texts = []
    for seed in "334":
        assert main([*arguments, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_ctrl_c_prints_the_report_and_exits_130(stories: pathlib.Path) -> None:
    command = [sys.executable, "-m", "edgekv", "run", "--model", str(stories), "--prompt", "Once"]
    command += ["--max-new-tokens", "100000", "--stop", "never said", "--device", "numpy"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in stderr
    assert b"Traceback" not in stderr


def test_a_reader_that_goes_away_is_no_crash(stories: pathlib.Path) -> None:
    command = f"{sys.executable} -m edgekv run --model {stories} --prompt Once --max-new-tokens 300 | head -c 5"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=300)
    assert b"Traceback" not in done.stderr


def test_info_and_budget_print_exact_bytes(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", str(model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["kv_heads"], facts["head_dim"]) == (3, 2, 16)
    assert facts["parameters"] == sum(array.size for array in golden_cases.tensors("llama31").values())
    assert main(["budget", "--model", str(model), "--ctx", "50", "--kv", "dense", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache_bytes"] == 3 * 2 * 50 * 16 * 2 * 2
    assert main(["budget", "--model", str(model)]) == 0
    assert "fits in" in capsys.readouterr().out


def budget(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["budget", "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_budget_of_a_shape_says_whether_it_fits_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "llama3.1-8b", "--ctx", "32768"]
    dense = budget(capsys, *shape, "--kv", "dense", "--memory", "8G")
    assert dense["cache_bytes"] == 32 * 2 * 8 * 128 * 2 * 32768
    assert not dense["fits"]
    assert dense["least_machine_bytes"] == 16 << 30
    auto = budget(capsys, *shape, "--kv", "auto", "--memory", "8G")
    assert auto["fits"]
    assert auto["total_bytes"] <= auto["available_bytes"] == 7 << 30
    assert auto["least_machine_bytes"] == 8 << 30
    small = budget(capsys, *shape, "--kv", "auto", "--memory", "4G")  # not even the smallest scheme
    assert not small["fits"]
    assert main(["budget", *shape, "--kv", "auto", "--memory", "8G"]) == 0
    assert "fits in 7.0 GiB of 8.0 GiB" in capsys.readouterr().out
    for arguments in (["--shape", "llama9"], ["--shape", "tiny", "--model", "demo"], ["--memory", "much"]):
        assert main(["budget", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_caches_and_kv_list_name_every_scheme(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgekv.kvcache.registry import PRESETS

    main(["schemes"])
    listed = capsys.readouterr().out
    main(["run", "--kv", "list"])
    assert capsys.readouterr().out == listed
    table, _, notes = listed.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:]] == [*PRESETS, *SCHEMES]
    assert max(map(len, listed.splitlines())) <= 100
    assert "--kv auto takes q4" in notes
    dense = next(line.split() for line in table.splitlines() if line.startswith("dense"))
    assert dense[1] == "512.0"
    assert dense[3] == "1.0x"
    main(["caches", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert {"name", "paper", "options", "tradeoff", "bytes_per_token_per_kv_head", "kl", "attention"} <= set(
        facts[0]
    )


def test_quantize_makes_a_store_that_runs_elsewhere(
    stories: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(["quantize", "--model", str(stories), "--weights", "int8", "--output", str(store)]) == 0
    assert (
        main(["run", "--model", str(store), "--prompt", "Once upon a time", "--max-new-tokens", "8", "--greedy"])
        == 0
    )
    assert capsys.readouterr().out.splitlines()[-1].startswith(", there was")
    assert main(["info", "--model", str(store)]) == 0
    assert "int8" in capsys.readouterr().out
    moved = store.rename(tmp_path / "moved")
    assert main(["run", "--model", str(moved), "--prompt", "Once upon a time", "--max-new-tokens", "8"]) == 0


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    whole = parser()
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            whole.parse_args([command, "--help"])
        assert f"usage: edgekv {command}" in capsys.readouterr().out


BAD = {
    "--model /no/such": "/no/such",
    "--kv h2b": "--kv h2b is unknown; accepted: f16, q8",
    "--kv h1b:sketch_bits=7": "accepted: 64, 128, 192",
    "--kv dense:v_bits=1": "applies to: planes",
    "--weights int2": "accepted: auto",
    "--ctx 65": "--ctx 65: this model has 64 positions",
    "--temperature -1": "--temperature -1: accepted: ",
    "--temperature hot": "--temperature hot: give a number",
    "--logit-bias 5": "give ID=BIAS",
    "--config /no/config.json": "/no/config.json",
    "": "no tokenizer",
    "--tokenizer /no/tokenizer": "/no/tokenizer",
    "--device tpu": "cpu, numpy",
    "--overflow wrap": "--overflow wrap is unknown; accepted: stop, slide",
    "--kv-budget 1K": "--kv-budget",
    "--kv-budget 1X": "--kv-budget 1X is not understood",
    "--power x": "--power x is unknown; accepted: auto, rpi-pmic",
    "--ctx 0": "--ctx: '0' is not a whole number of 1 or more; see `edgekv run --help`",
    "--verbose": "--json FILE has every measurement",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_and_exit_2(
    arguments: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--model", str(model), "--prompt", "x", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("edgekv: error: ")
    assert captured.err.count("\n") == 1
    assert BAD[arguments] in captured.err


def test_other_commands_name_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command, said in {
        "run": "no prompt: give --prompt TEXT",
        "run --prompt-file /no/file": "cannot be read",
        "run --prompt x --ctx 64 --draft x": "--draft x is unknown; accepted: none, ngram, auto",
        "chat --ctx 64 --chat-template x": "--chat-template x: cannot be read",
        "power --meter x": "--meter x is unknown; accepted: auto, rpi-pmic",
        "nosuch": "invalid choice",
    }.items():
        assert main(command.split()) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("kv", ["dense", "kivi2"])
def test_without_a_model_the_demo_runs_and_retrieves(kv: str, capsys: pytest.CaptureFixture[str]) -> None:
    prose = "The old man walked along the road to the village, and the rain fell on the fields. "
    question = "\n\nWhat is the pass key? The pass key is"
    prompt = prose * 12 + "The pass key is 48213. Remember it. " + prose * 12 + question
    assert main(["run", "--prompt", prompt, "--max-new-tokens", "8", "--greedy", "--kv", kv]) == 0
    assert capsys.readouterr().out.split()[0].startswith("48213")


def test_a_full_disk_while_quantizing(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """RLIMIT_FSIZE makes write() fail as a full disk does."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "from edgekv.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "quantize", "--model", str(model), "--weights", "f32"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    done = subprocess.run(command, capture_output=True, timeout=300, env=environment)
    assert done.returncode == 2, done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert list((tmp_path / "edgekv" / "stores").iterdir()) == []


# What the library calls a parameter, the command line calls an option


IN_FLAGS = {
    "ctx=65: this model has 64 positions": "--ctx 65: this model has 64 positions",
    "raise `kv_budget`, or set overflow='slide'": "raise --kv-budget, or set --overflow slide",
    "pass tokenizer=PATH; or config='a/b.json'": "pass --tokenizer PATH; or --config a/b.json",
    "top_k=-1 is out of range": "--top-k -1 is out of range",
    'model="it\'s here": there is none': "--model it's here: there is none",
    "leave `images` out": "leave --image out",
    "kv='': accepted": "--kv '': accepted",
}
AS_THEY_ARE = (
    "weights of the model and `unknown` words",
    "onebit:sink=4,residual_length=128 and steps:budget=9",
    "--kv dense has no kernel",
    "'top_k=3 `ctx`' was said, not \"seed=1\"; don't",
    "/a/ctx=5/x: can't be read",
)


def test_in_flags() -> None:
    assert {text: in_flags(text) for text in IN_FLAGS} == IN_FLAGS
    assert [in_flags(text) for text in AS_THEY_ARE] == [*AS_THEY_ARE]
    given = "see `ctx` and seed=3"
    error = EdgeKVError(f"stop={given}: lower `ctx`", field="stop", value=given)
    assert in_flags(error) == f"--stop {given}: lower --ctx"  # what a user gave stays


def test_in_flags_names_options_that_the_command_has() -> None:
    text = "meter='x': lower `ctx` or `kv_budget`"
    assert in_flags(text, {"--power", "--ctx"}) == "--power x: lower --ctx or `kv_budget`"
    assert in_flags(text, {"--meter"}) == "--meter x: lower `ctx` or `kv_budget`"


def test_every_parameter_has_an_option_of_the_command_line() -> None:
    """Those of a session and of sampling."""
    options = {
        option
        for command in COMMANDS
        for action in parser()._subparsers._group_actions[0].choices[command]._actions
        for option in action.option_strings
    }
    names = [field.name for kind in (Options, SamplingParams) for field in dataclasses.fields(kind)]
    assert {FLAGS[name] for name in names} <= options


# The TAB key

ASK = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={at}; COMP_LINE="{words}"
_shtab_edgekv 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "edgekv.bash"
    path.write_text(out.getvalue())
    return path


def completed(script: pathlib.Path, *words: str, folder: pathlib.Path | None = None) -> list[str]:
    ask = ASK.format(words=" ".join(words[:-1]) + f" {words[-1]!r}", at=len(words) - 1)
    done = subprocess.run(
        ["bash", "-c", ask, "bash", script], capture_output=True, text=True, cwd=folder, check=True
    )
    return done.stdout.split()


def test_commands_options_and_files(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert completed(script, "edgekv", "sc") == ["schemes"]
    assert "--max-new-tokens" in completed(script, "edgekv", "run", "--max-")
    (tmp_path / "notes.txt").touch()
    assert "notes.txt" in completed(script, "edgekv", "run", "--prompt-file", "no", folder=tmp_path)
