"""The command line as a user meets it: processes, errors of one line each with exit status 2, TAB."""

import dataclasses
import io
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import golden_cases
import pytest
from helpers import SCHEMES, Cli

from edgekv import SamplingParams
from edgekv.checkpoint.hub import parse_model_name, read_shape
from edgekv.cli import COMMANDS, build_parser, parse
from edgekv.cli.options import bytes_text, error_text, option_name
from edgekv.cli.terminal import Bars
from edgekv.engine.loading import Options
from edgekv.errors import EdgeKVError, PowerError
from edgekv.eval.bench import unread_model
from edgekv.kvcache.registry import PRESETS
from edgekv.weights.formats import ROUTER, ModelFormat, allocate_layer_bits


def test_run_streams_text_and_reports(stories: pathlib.Path, tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report.json"
    given = ["--model", stories, "--prompt-file", "-", "--max-new-tokens", 30, "--json", report, "--greedy"]
    command = [sys.executable, "-m", "edgekv", "run", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, input="Once upon a time")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(", there was a little girl named Lily")
    facts = json.loads(report.read_text())
    assert (facts["decode_tokens"], facts["settings"]["kv"]) == (29, "dense:dtype=f16")
    assert facts["machine"]["versions"]["edgekv"]
    for name in ("latency_median_ms", "latency_p95_ms", "prefill_tokens_per_s", "achieved_gb_per_s"):
        assert facts[name] > 0


def test_a_reader_that_goes_away_is_no_crash(stories: pathlib.Path) -> None:
    command = f"{sys.executable} -m edgekv run --model {stories} --prompt Once --max-new-tokens 300 | head -c 5"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=300)
    assert b"Traceback" not in done.stderr


def test_info_and_budget_print_exact_bytes(model: pathlib.Path, cli: Cli) -> None:
    facts = json.loads(cli("info", "--model", model, "--json").out)
    assert (facts["layers"], facts["kv_heads"], facts["head_dim"]) == (3, 2, 16)
    assert facts["parameters"] == sum(array.size for array in golden_cases.tensors("llama31").values())
    said = cli("budget", "--model", model, "--ctx", "50", "--kv", "dense", "--json")
    assert json.loads(said.out)["cache_bytes"] == 3 * 2 * 50 * 16 * 2 * 2


def budget(cli: Cli, *arguments: object, fits: bool = True) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(cli("budget", "--json", *arguments, status=int(not fits)).out)
    assert facts["fits"] == fits
    return facts


def test_budget_of_a_shape_says_whether_it_fits_a_machine(cli: Cli) -> None:
    shape = ["--shape", "llama3.1-8b", "--ctx", "32768"]
    dense = budget(cli, *shape, "--kv", "dense", "--memory", "8G", fits=False)
    assert dense["cache_bytes"] == 32 * 2 * 8 * 128 * 2 * 32768
    assert dense["least_machine_bytes"] == 16 << 30
    auto = budget(cli, *shape, "--kv", "auto", "--memory", "8G")
    assert auto["total_bytes"] <= auto["available_bytes"] == 7 << 30
    assert auto["least_machine_bytes"] == 8 << 30
    assert budget(cli, *shape, "--memory", "4G", fits=False)["longest_ctx"] == {}  # not even the weights fit
    assert "438 B of 500 B, an eighth left" in cli("budget", "demo", "--memory", "500B", status=1).out


@pytest.mark.parametrize("name", ["llama3.2-1b", "mixtral-8x7b"])
def test_a_budget_of_bits_by_need_is_an_upper_bound(name: str, cli: Cli) -> None:
    """Also of what a token reads where all but the experts get most bits."""
    model = unread_model(name, read_shape(name))
    sizes = {k: each.n_elements for k, each in model.arch.linears().items() if not k.endswith(ROUTER)}
    for mean in (2.1, 3.6, 4.9):
        needs = {k: 1 + i % 5 + 1e3 * ("experts" not in k) for i, k in enumerate(sizes)}
        form = ModelFormat("", tuple((k, f"q{n}") for k, n in allocate_layer_bits(needs, sizes, mean).items()))
        most, needed = budget(cli, name, "--weights", f"q{mean}", "--memory", "99G"), model.weights_bytes(form)
        assert 0.97 * most["weights_bytes"] < needed <= most["weights_bytes"]
        assert 0.8 * most["active_weights_bytes"] < needed - model.idle_bytes(form) <= most["active_weights_bytes"]


def test_a_budget_of_bits_by_need_chooses_by_its_bytes(cli: Cli) -> None:
    given = ["mixtral-8x7b", "--memory", "64G", "--ctx", "5600", "--weights"]  # where q3 chooses another cache
    low, high, facts = (budget(cli, *given, weights) for weights in ("q2", "q3", "q2.1"))
    assert facts["kv"] == low["kv"] != high["kv"]
    whole, said = facts["weights_bytes"], cli("budget", *given, "q2.1").out
    idle = bytes_text(whole - facts["active_weights_bytes"])
    assert f"at most {bytes_text(whole)} as q2.1, at least {idle} of them experts" in said
    assert f"{idle.partition(' (')[0]} of the weights are experts" in said


def test_a_budget_says_which_context_would_fit(cli: Cli) -> None:
    """To the token, with the scheme asked for and with another that fits more."""
    for memory, kv in (("6G", "auto"), ("8G", "f16")):
        given = ["llama3.1-8b", "--memory", memory]
        found = budget(cli, *given, "--ctx", "32768", "--kv", kv, fits=False)["longest_ctx"]
        assert set(found) == ({"q4", "q1.5"} if kv == "auto" else {"f16", "q4"})
        for name, ctx in found.items():
            budget(cli, *given, "--ctx", ctx, "--kv", name)
            if ctx < 32768:
                budget(cli, *given, "--ctx", ctx + 1, "--kv", name, fits=False)
    line = f"longest     --ctx {found['f16']} with --kv f16, or --ctx 32768 with --kv q4\n"
    assert line in cli("budget", *given, "--ctx", "32768", "--kv", kv, status=1).out


def test_schemes_and_kv_list_name_every_scheme(cli: Cli) -> None:
    listed = cli("schemes").out
    assert cli("run", "--kv", "list").out == listed
    table = listed.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[1:] if line[0] != " "] == [*PRESETS, *SCHEMES]
    assert {line.split()[0] for line in table if "on average" in line} == {"q3", "q2", "q1.5"}
    assert "..." not in listed
    assert len({line.split(None, 4)[4] for line in table[1 : 1 + len(PRESETS)]}) == len(PRESETS)
    dense = next(line.split() for line in table if line.startswith("dense"))
    assert (dense[1], dense[3]) == ("512.0", "1.0x")
    assert "bytes_per_token_per_kv_head" in json.loads(cli("schemes", "--json").out)[0]


def test_a_quantized_store_runs_elsewhere(stories: pathlib.Path, tmp_path: pathlib.Path, cli: Cli) -> None:
    store = tmp_path / "store"
    cli("quantize", "--model", stories, "--weights", "int8", "--output", store)
    assert re.search(r"^quantized +int8$", cli("info", "--model", store).out, re.MULTILINE)
    run = ["run", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--greedy"]
    assert cli(*run, "--model", store.rename(tmp_path / "moved")).out.startswith(", there was")


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args([command, "--help"])
        assert f"usage: edgekv {command}" in capsys.readouterr().out


BAD = {
    "run --prompt x --model /no/such": "/no/such",
    "run --prompt x --kv dense:v_bits=1": "applies to: planes",
    "run --prompt x --weights int2": "also int8-32, int4, int4-32, and q2.1 to q4.9 in `edgekv quantize --c",
    "run --prompt x --ctx 9000000": "--ctx 9000000",
    "run --prompt x --ctx 0": "--ctx",
    "run --prompt x --temperature -1": "--temperature -1",
    "run --prompt x --temperature hot": "--temperature hot",
    "run --prompt x --logit-bias 5": "--logit-bias",
    "run --prompt x --config /no/config.json": "/no/config.json",
    "run --prompt x --tokenizer /no/tokenizer": "/no/tokenizer",
    "run --prompt x --device GPU": "accepted: auto, cpu, numpy, cuda; did you mean cuda?",
    "run --prompt x --kv-budget 1X": "--kv-budget 1X",
    "run --prompt x --power x": "--power x",
    "run --prompt x --verbose": "--verbose",
    "run --promt x": "did you mean --prompt",
    "run demo x --kv q44": "did you mean q4?",
    "run demo x --kv int8": "did you mean q8?",
    "run demo x --kv q5_1": "did you mean q4?",
    "run scnes x": "did you mean scenes?",
    "run word": "a text comes second: edgekv run demo word",
    "run demo": "edgekv run demo 'TEXT'",
    "run demo two words": "'words' is one word too many; a text with blanks needs quotes",
    "run demo --ctx 64 x --prompt y": "both 'x' and --prompt",
    "run --model demo demo": "both 'demo' and --model",
    "chat demo --model demo": "both 'demo' and --model",
    "serve demo --prot 80": "did you mean --port?",
    "bench --shape qwen3-0.6b --ctx 512": "--ctx: is no option of `edgekv bench`",
    "budget qwen3-9b": "or of its shape: qwen3-",
    "pull demo extra": "'extra' is one word too many; see `edgekv pull --help`",
    "list nothing": "'nothing' is one word too many; see `edgekv list --help`",
    "run qwen3-0.6 x": "did you mean Qwen/Qwen3-0.6B (596 M parameters)?",
    "run --model qwen3:0.6b --prompt x": "did you mean Qwen/Qwen3-0.6B (596 M",
    "pull qwen3-0.6": "did you mean Qwen/Qwen3-0.6B (596 M",
    "budget demo --memory 4": "--memory 4: has no unit; accepted: 4G, 4M, 4K, 4B; did you mean 4G?",
    "budget demo --memory 0": "--memory 0: accepted: more than 0 bytes",
    "budget demo --memory 0.0G": "--memory 0.0G: accepted: more than 0 bytes",
    "run demo x --kv q3:": "did you mean q3?",
    "run demo x --kv q2.5": "did you mean planes:k_bits=2.5,v_bits=2.5?",
    "run demo x --kv planes:kbits=2": "did you mean k_bits or v_bits?",
    "run demo x --kv q4:sinks=3": "--kv q4:sinks=3: 'sinks' is not one of its options (here with their defaults); "
    "accepted: k_bits=4, v_bits=4, sink=4, residual_length=128, key_scale=0.0, seed=0, mixed_bits=False; did you",
    "bench demo --ctx 4": "did you mean --depth?",
    "run demo x --ctx 8x": "such as 8192 or 8k",
    "run demo x --threads 0": "'0' is not a whole number of 1 or more; see",
    "run demo x --kv-budget 1.0M --ctx 8k": "--kv-budget 1.0M: 8192 tokens need at least 3.5 MiB in this model",
    "run demo x --kv-budget 1024K": "accepted: 3.6M or more",
    "ls": "did you mean edgekv list?",
    "version": "did you mean edgekv --version?",
    "rnu": "did you mean run?",
    "serve --port -1": "--port -1: accepted: 0 to 65535",
    "serve --port 99999": "--port 99999: accepted: 0 to 65535",
    "run --prompt x --ctx 64 --draft x": "--draft x",
    "run": "--prompt",
    "chat --ctx 64 --chat-template x": "--chat-template x",
    "chat --session pyproject.toml --chat-template x": "--chat-template x",  # before the session is read
    "power --meter x": "--meter x",
    "nosuch": "nosuch",
}


def test_bad_input_is_one_line_and_exit_2(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    for command, blamed in BAD.items():
        assert blamed in cli(*command.split(), status=2).err


def test_words_and_a_pipe_in_place_of_options(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and prompt, wherever options stand; the text begins without the blank behind the prompt."""
    rest = ["--max-new-tokens", "6", "--greedy"]
    text = cli("run", "--model", "demo", "--prompt", "It was a dark", *rest).out
    assert text == text.strip() + "\n" != "\n"
    for words, piped in {
        ("demo", "It was a dark"): b"ignored",
        ("demo", *rest, "It was a dark"): b"",
        ("--model", "demo", "It was a dark"): b"",
        ("demo",): b"It was a dark\r\n",
        ("demo", "-"): b"It was a dark\n",
        ("demo", "--kv", "FP16", "It was a dark"): b"",
    }.items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
        assert cli("run", *words, *(() if rest[0] in words else rest)).out == text
    assert "qwen3-0.6b, 596 M parameters" in cli("budget", "qwen3-0.6b", "--ctx", "64").out
    assert str(parse_model_name("Qwen3-0.6b")) == "Qwen/Qwen3-0.6B"


def test_other_programs_names_of_options() -> None:
    arguments = parse(["run", "-m", "demo", "x", "-n", "3", "--temp", "0.5", "-c", "2k"])
    assert (arguments.max_new_tokens, arguments.temperature, arguments.ctx) == (3, 0.5, 2048)


def test_what_is_set_in_vain_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores, and time at rest where nothing reads its power; k stands for 1024 tokens."""
    refuses = mock.Mock(side_effect=PowerError("no sensor here"))
    monkeypatch.setattr("edgekv.cli.power.find_power_meter", refuses)
    run = ["run", "demo", "It was", "--max-new-tokens", "2", "--ctx", "1k"]
    said = cli(*run, "--threads", "999", "--power-idle", "1").err
    assert "--threads 999: this process may use" in said
    assert "no sensor here" in said
    assert "context of 1,024 tokens" in said


def test_a_long_task_is_said_now_and_then_where_no_bar_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for long_s, again_s, lines in ((-1.0, math.inf, 1), (-1.0, -1.0, 4), (math.inf, -1.0, 0)):
        monkeypatch.setattr("edgekv.cli.terminal.NOTICE_S", long_s)
        monkeypatch.setattr("edgekv.cli.terminal.REPEAT_S", again_s)
        with Bars() as bars:
            for done in range(5):
                bars.update("compiling", done, 4)
            for done in range(5):
                bars.update("prefill", done, 4)
        said = [f"edgekv: compiling: {25 * n}%" for n in range(1, lines + 1)]
        assert capsys.readouterr().err.splitlines() == said


# What the library calls a parameter, the command line calls an option


def parsers() -> dict[str, Any]:
    """Returns the parser of each command."""
    return dict(build_parser()._subparsers._group_actions[0].choices)


def test_errors_name_options() -> None:
    """Those of the command; what a user gave stays as it is."""
    given = "see `ctx`, {ctx} and seed=3"
    advice = "lower {ctx}, or set {overflow:slide}"
    error = EdgeKVError("is too long", field="kv_budget", value=given, accepted=["1", "2"], advice=advice)
    rest = "is too long; accepted: 1, 2; lower"
    assert str(error) == f"kv_budget={given!r}: {rest} `ctx`, or set overflow='slide'"
    assert error_text(error) == f"--kv-budget {given}: {rest} --ctx, or set --overflow slide"
    assert error_text(error, {"--ctx"}) == f"kv_budget={given!r}: {rest} --ctx, or set overflow='slide'"
    error = EdgeKVError(field="meter", value="x", accepted=["auto"])
    assert error_text(error, {"--power"}) == "--power x: accepted: auto"
    assert error_text(error, {"--meter"}) == "--meter x: accepted: auto"


def test_every_parameter_has_an_option_of_the_command_line() -> None:
    """Checks the parameters of a session and of sampling."""
    actions = [action for sub in parsers().values() for action in sub._actions]
    options = {option for action in actions for option in action.option_strings}
    names = [field.name for kind in (Options, SamplingParams) for field in dataclasses.fields(kind)]
    assert {option_name(name) for name in names} <= options


# The TAB key

ASK = """
source "$1"
COMP_WORDS=({words}); COMP_CWORD={at}; COMP_LINE="{words}"
_shtab_edgekv 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


COMPLETED = {
    "edgekv sc": ["schemes"],
    "edgekv run --max-n": ["--max-new-tokens"],
    "edgekv run --prompt-file no": ["notes.txt"],
    "edgekv run --kv q1": ["q1.5"],
}


def completed(folder: pathlib.Path, command: list[str]) -> list[str]:
    """Returns what a shell offers, in a folder with notes.txt."""
    (folder / "notes.txt").touch()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_commands_options_and_files(tmp_path: pathlib.Path, cli: Cli) -> None:
    (tmp_path / "edgekv.bash").write_text(cli("completion", "bash").out)
    for words, expected in COMPLETED.items():
        ask = ASK.format(words=words, at=words.count(" "))
        assert completed(tmp_path, ["bash", "-c", ask, "bash", "edgekv.bash"]) == expected


def test_fish_knows_every_command_and_option(tmp_path: pathlib.Path, cli: Cli) -> None:
    """A line each, in the command's own place; where fish is installed, it answers as the others do."""
    script = cli("completion", "fish").out
    lines = {line.partition(" -d ")[0].split(" -r")[0].removesuffix(" -F") for line in script.splitlines()}
    for command, sub in parsers().items():
        assert f"complete -c edgekv -n '__fish_use_subcommand' -a {command}" in lines
        for names in (action.option_strings for action in sub._actions if action.option_strings):
            spelled = "".join(f" -{'l' if name[1] == '-' else 's'} {name.lstrip('-')}" for name in names)
            assert f"complete -c edgekv -n '__edgekv_is_at {command}'{spelled}" in lines
    assert "complete -c edgekv -n '__edgekv_is_at power record' -l csv" in lines
    if shutil.which("fish"):
        (tmp_path / "edgekv.fish").write_text(script)
        more = {"edgekv run --kv no": [], "edgekv power record --cs": ["--csv"], "edgekv completion f": ["fish"]}
        for words, expected in (COMPLETED | more).items():
            assert completed(tmp_path, ["fish", "-c", f"source edgekv.fish; complete -C '{words}'"]) == expected
