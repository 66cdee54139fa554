"""Documents and packages: commands shown exist, links resolve, tables agree, examples run, the site builds."""

import argparse
import ast
import os
import pathlib
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator

import pytest
import site_links
import tables
import yaml

import edgekv.plugin
from edgekv import errors
from edgekv.cli import COMMANDS, build_parser, main
from edgekv.cli.run import MIN_TOKENS
from edgekv.eval.gate import DEFAULT_SCHEMES, NEEDLES, GateLimits
from edgekv.kvcache.choice import AUTO, MAX_LOSS, MIN_SAVING, default_scheme
from edgekv.kvcache.registry import PRESETS, CacheSpec
from edgekv.models import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ALL = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("models/*/*.md")]
CURRENT = [*(page for page in DOCS.rglob("*.md") if DOCS / "lab" not in page.parents)]
CURRENT += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
"""What is kept true; lab reports and the changelog tell of what was."""
FENCE = re.compile(r"^```(?:sh|bash)\n(.*?)^```|^    (edgekv [^\n]*)$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(edgekv [^`]+)`")
OPTION = re.compile(r"(?<![-\w])--[a-z][-a-z]*[a-z]")


def shown_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of every `edgekv COMMAND ...` in the text's code, up to what ends a command of a shell."""
    code = [first or second for first, second in FENCE.findall(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    code += [" ".join(inline.split()) for inline in INLINE.findall(prose)]
    for command in re.split(r"&&|\||;|#|\n", "\n".join(code).replace("\\\n", " ")):
        if found := re.search(r"(?:^|\s)edgekv ([a-z]+.*)", command):
            yield found[1].split()


def unknown_words(words: list[str]) -> list[str]:
    """Returns what of a command line is no command, or no option of it."""
    if words[0] not in (*COMMANDS, "completion"):
        return [words[0]]
    sub = _choices(build_parser())[words[0]]
    for word in words[1:]:
        if word == "--":
            break
        sub = _choices(sub).get(word, sub)
    own = words[: words.index("--")] if "--" in words else words
    known = {option for action in sub._actions for option in action.option_strings}
    return [option for option in OPTION.findall(" ".join(own)) if option not in known]


def _choices(sub: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in sub._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_pages_say_what_the_code_has_and_agree() -> None:
    """Names and figures that several pages mention, each from where it is decided or was measured."""
    packed, limits, lossy = default_scheme(), GateLimits(), ", ".join(f"`{kv}`" for kv in DEFAULT_SCHEMES[:-1])
    pairs = re.findall(r"\| 8,192 \| ([\d.]+) \| ([\d.]+) \|", (DOCS / "speed.md").read_text())
    exact, packed_2 = ([float(figure) for figure in column] for column in zip(*pairs, strict=True))
    beside = [f"{min(figures)} to {max(figures)} times" for figures in (exact, packed_2)]
    said = {
        "README.md": [f"edgekv takes `{packed}`", f"{len(set(families()))} families", *beside],
        "docs/schemes.md": [f"at most {MAX_LOSS} nats", f"Otherwise it takes `{packed}`", "a tenth"],
        "docs/memory.md": [f"`{packed}` about {CacheSpec.parse(packed).bytes_per_token() / 256:.2f}"],
        "docs/gate.md": [
            *(f"`--max-kl` | {limits.max_kl} |", f"`--min-top1` | {limits.min_top1:.2f} |"),
            *(f"{NEEDLES} in all", f"{lossy} and `{DEFAULT_SCHEMES[-1]}`", "smallest that passed"),
        ],
        "docs/start.md": [f"{MIN_TOKENS} tokens", f"`{packed}`", "127.0.0.1:8080"],
    }
    assert MIN_SAVING == 0.1
    texts = {name: " ".join((ROOT / name).read_text().split()) for name in said}
    assert [(name, each) for name, text in texts.items() for each in said[name] if each not in text] == []


def test_errors_that_are_explained_are_printed() -> None:
    """What troubleshooting quotes of edgekv's lines stands in its code."""
    lines = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    quoted = {text for line in lines for text in re.findall("`([^`]* [^`]*)`", line)}
    code = "".join(path.read_text() for path in (ROOT / "edgekv").rglob("*.py"))
    code = code.replace("{arguments.host}", "0.0.0.0")
    others = {"edgekv: command not found", "pip install edgekv", "pip install 'edgekv[...]'"}
    assert {text for text in quoted - others if text not in code} == set()
    assert len(quoted - others) > 4


def families() -> list[str]:
    """Returns the rows of the table of families, which has every type that is registered."""
    table = (DOCS / "models.md").read_text().partition("## Files")[0]
    rows = re.findall(r"^\| (`[^`]+`(?:, `[^`]+`)*) \|", table, re.M)
    assert {name.strip("`") for row in rows for name in row.split(", ")} >= set(FAMILIES)
    return rows


def test_each_option_is_one_of_the_command_that_it_stands_with() -> None:
    shown = {page.name: shown_commands(page.read_text()) for page in CURRENT}
    wrong = {name: [words for words in commands if unknown_words(words)] for name, commands in shown.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_names_of_code_exist() -> None:
    """In backticks on pages, in docstrings and comments: renaming what one mentions needs its mention renamed."""
    roots = [ROOT / name for name in ("edgekv", "tests", "tools", "examples")]
    python, cuda = ([path for root in roots for path in root.rglob(f"*.{end}")] for end in ("py", "cu"))
    others = [*cuda, *ROOT.glob("*.toml"), ROOT / "mkdocs.yml", *ROOT.glob("edgekv/server/page/*.js")]
    known = {word for path in others for word in re.findall(r"\w+", path.read_text())}
    for path in python:
        known |= {*path.parts, path.stem}
        for node in ast.walk(ast.parse(path.read_text())):
            names = (getattr(node, field, None) for field in ("name", "id", "attr", "arg", "value"))
            known.update(*(name.split(".") for name in names if isinstance(name, str) and " " not in name))
    known |= {"libgomp", "libgomp1", "hf_hub_download", "save_pretrained", "gemma4", "Axes", "proc"}  # of others
    known |= {"CUDA_VISIBLE_DEVICES", "HOST", "PORT", "MACHINE", "tutor", "terse"}  # a reader's own
    quoted = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^)`]*\))?`(?!`)")
    pages = [*CURRENT, *cuda, *(path for path in python if ROOT / "edgekv" in path.parents)]
    named = {(page.name, name) for page in pages for name in quoted.findall(page.read_text())}
    assert len(named) > 900
    assert {(page, name) for page, name in named if not {*name.split(".")} <= known} == set()


def test_links_lead_to_files() -> None:
    targets = [(page, found[3]) for page in ALL for found in site_links.LINK.finditer(page.read_text())]
    local = [(page, target) for page, target in targets if "://" not in target]
    assert len(local) > 100
    assert [(page.name, target) for page, target in local if not (page.parent / target).exists()] == []


def test_examples_name_no_scheme_but_presets() -> None:
    """Who follows them gets what `auto` takes, or compares the names of docs/schemes.md."""
    about = {"schemes.md", "papers.md", "quality.md", "pictures.md", "minimal.py", "edgekv_bf16.py"}
    pages = [*CURRENT, *ROOT.glob("models/*/*.md"), *ROOT.rglob("examples/**/*.py"), *ROOT.glob("packaging/*")]
    pages += [ROOT / "tools" / "hour" / "walk.py", *ROOT.glob("edgekv/engine/*.py")]
    named = re.compile(r"""(?:--kv[ =]"?|kv="|"--kv", default="|\bKV=)([\w.]+(?:,[\w.:=]+)*)""")
    allowed, strays = {*PRESETS, AUTO, "LIST", "NAME", "name", "all"}, {}
    for page in (page for page in pages if page.is_file() and page.name not in about):
        kvs = {kv for names in named.findall(page.read_text()) for kv in names.split(",")}
        strays |= {str(page): kvs - allowed} if kvs - allowed else {}
    assert strays == {}


def test_generated_tables_agree() -> None:
    assert tables.main(["--check"]) == 0


def examples() -> list[str]:
    pages = [ROOT / "README.md", DOCS / "library.md", DOCS / "cookbook.md"]
    return [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("code", examples())
def test_examples_run(code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(code, {})
    assert capsys.readouterr().out.strip()


def test_the_report_of_the_first_command_is_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """But for times, speeds, what the process took, and how far a slow machine's first compiling is."""
    (shown,) = re.findall(r"^```\n(model .*?)^```", (DOCS / "start.md").read_text(), re.M | re.S)
    prompt = re.search(r'edgekv run .*?"(.*?)"', (DOCS / "start.md").read_text())
    assert prompt
    assert prompt[0] in (ROOT / "README.md").read_text()
    assert main(["run", "--prompt", prompt[1], "--seed", "1"]) == 0

    def steady(text: str) -> list[str]:
        text = re.sub(r"[\d.]+ s\b|[\d.]+ tokens/s|\d+ tokens(?= at|$)|peak .*", "N", text, flags=re.M)
        return [
            " ".join(line.split()) for line in text.splitlines() if not line.startswith(("energy", "edgekv: "))
        ]

    assert steady(capsys.readouterr().err) == steady(shown)


def test_every_public_name_is_in_the_reference() -> None:
    told = set(re.findall(r"^::: edgekv\.(\S+)$", (DOCS / "library.md").read_text(), re.MULTILINE))
    plugin = {f"plugin.{name}" for name in set(edgekv.plugin.__all__) - {"loops", "scalar", "tile"}}
    assert told == set(edgekv.__all__) - {"__version__"} | plugin


def test_the_site_builds_and_fetches_nothing(tmp_path: pathlib.Path) -> None:
    """Without a warning; scripts, styles, fonts and pictures are its own. Needs the extra docs."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'edgekv[docs]'")
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings: pip install 'edgekv[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), f"{page.name}: {tag}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


# What packaging/ starts and the workflow runs is what edgekv accepts

PACKAGING = ROOT / "packaging"


def assigned(text: str, key: str) -> dict[str, str]:
    lines = re.findall(rf"^{key}(.*)$", text, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line) if "=" in word)


def test_packages_start_what_edgekv_accepts() -> None:
    """The command line's own parser takes it, each variable replaced by its default; the scheme is not theirs."""
    service, container = ((PACKAGING / name).read_text() for name in ("edgekv.service", "Containerfile"))
    container = container.replace("\\\n", " ")
    for text, key, begin in (
        (service, "Environment=", r"ExecStart\w*=/opt/edgekv/bin/edgekv"),
        (container, "ENV ", "CMD exec edgekv"),
    ):
        variables, (command,) = assigned(text, key), re.findall(rf"^{begin} (.*)$", text, re.M)
        assert variables["KV"] == AUTO
        words = shlex.split(string.Template(command).substitute(variables))
        assert words[0] == "serve"
        build_parser().parse_args(words)
    settings = dict(re.findall(r"^(\w+)=(.*)$", service, re.M))
    assert "MemoryDenyWriteExecute" not in settings  # it compiles
    assert settings["CacheDirectoryMode"] == "0700"  # prompts are kept there
    cache, variables = f"/var/cache/{settings['CacheDirectory']}", assigned(service, "Environment=")
    assert all(variables[name].startswith(cache) for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"))
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=\S+ )?(.*) \S+$", container, re.M)
    files = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in files)
    folders = re.findall(r'^"share/\S+ = \["(\w+(?:/data)?)/', (ROOT / "pyproject.toml").read_text(), re.M)
    assert {"edgekv", "pyproject.toml", *folders} <= files


def test_the_workflow_runs_what_is_here() -> None:
    """README's tests on both processors, the build, and the board's command; with no right but to read."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    machines = {row["runner"] for row in workflow["jobs"]["check"]["strategy"]["matrix"]["include"]}
    assert machines == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} == {
        *("actions/checkout", "actions/setup-python", "actions/upload-artifact")
    }
    ran = [line for step in steps for line in step.get("run", "").splitlines()]
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^<!-- test-command -->\s*```sh\n(.*?)\n```", readme, re.M | re.S)[0] in ran
    assert os.access(ROOT / next(line for line in ran if line.startswith("packaging/")), os.X_OK)
    boards = [build_parser().parse_args(shlex.split(line)[1:]) for line in ran if line.startswith("edgekv ")]
    assert [board.quick for board in boards] == [True, False]
    assert [f'cat {board.output}/*.md >> "$GITHUB_STEP_SUMMARY"' in ran for board in boards] == [True, True]


# What `import edgekv` gives


def test_type_checkers_see_the_same_names() -> None:
    """The names imported for type checkers are those given at run time."""
    text = pathlib.Path(edgekv.__file__).read_text()
    seen = re.findall(r"^    from edgekv\.(\S+) import (\w+) as \2$", text, re.M)
    assert {(home, name) for name, home in edgekv._HOMES.items() if home != "errors"} == set(seen)
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(edgekv.__all__)


def test_importing_loads_nothing_large() -> None:
    """Neither Numba nor onnxruntime, nor NumPy, before a name that needs it is used."""
    code = "import sys, edgekv; sys.exit(any(m in sys.modules for m in ('numba', 'onnxruntime', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
