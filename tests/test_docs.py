"""Documents: commands shown exist, links resolve, generated tables agree, examples run, the site builds."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import site_links
from shown_commands import shown, unknown

import edgekv
from edgekv.models import FAMILIES

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ALL = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("models/*/*.md")]
CURRENT = [*(page for page in DOCS.rglob("*.md") if DOCS / "lab" not in page.parents)]
CURRENT += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
"""What is kept true; lab reports and the changelog tell of what was."""


def test_each_option_is_one_of_the_command_that_it_stands_with() -> None:
    wrong = {page.name: [words for words in shown(page.read_text()) if unknown(words)] for page in CURRENT}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("edgekv run --kv planes --prompt x", []),
        ("edgekv info --prompt x", ["--prompt"]),
        ("edgekv power record --csv log.csv -- program --any-option", []),
        ("edgekv power record --kv planes -- program", ["--kv"]),
        ("edgekv fly", ["fly"]),
    ],
)
def test_a_wrong_option_is_found(line: str, wrong: list[str]) -> None:
    (words,) = shown(f"```sh\n. venv/bin/activate && {line} # said\n```\n")
    assert unknown(words) == wrong
    assert list(shown(f"It is `{line}`.")) == [words]


def test_links_lead_to_files() -> None:
    targets = [
        (page, found[3])
        for page in ALL
        for found in site_links.LINK.finditer(page.read_text())
        if "://" not in found[3]
    ]
    assert len(targets) > 100
    assert [(page.name, target) for page, target in targets if not (page.parent / target).exists()] == []


def test_generated_tables_agree() -> None:
    command = [sys.executable, ROOT / "tools" / "docs" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def examples() -> list[str]:
    pages = [ROOT / "README.md", DOCS / "library.md"]
    return [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("code", examples())
def test_examples_run(code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(code, {})
    assert len(capsys.readouterr().out) > 10


def test_every_public_name_is_in_the_reference() -> None:
    told = set(re.findall(r"^::: edgekv\.(\w+)$", (DOCS / "library.md").read_text(), re.MULTILINE))
    assert told == set(edgekv.__all__) - {"__version__"}


def test_every_family_has_its_row() -> None:
    page = (DOCS / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


def test_links_of_included_files_and_out_of_the_site() -> None:
    text = "[docs](docs/gate.md#limits), [card](models/demo/README.md), [how](CONTRIBUTING.md), [it](https://e.example)"
    moved = site_links.from_root(text)
    inside = site_links.LINK.sub(lambda link: site_links.within(link, "docs"), moved)
    assert inside == (
        "[docs](gate.md#limits), card (`models/demo/README.md`), [how](contributing.md), [it](https://e.example)"
    )


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe", reason="needs griffe: pip install 'edgekv[docs]'")
    from site_fields import listed

    text = "How.\n\nkv: the scheme:\n    long.\nctx, n: tokens ``x``.\nRaises an error: bad."
    assert listed(text) == (
        "How.\n\n\n- `kv`: the scheme:\n    long.\n- `ctx, n`: tokens `x`.\n\nRaises an error: bad."
    )


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
