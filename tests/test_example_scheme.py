"""The package in examples/scheme_package: a scheme that edgekv has never heard of, used everywhere by its name."""

import ast
import functools
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Cli, raises, text
from serving import DEMO, ROOT

import edgekv
from edgekv import CACHES, CacheError, CacheSpec, SamplingParams, Session, SessionError, plugin, register
from edgekv.kernels import numpy_kernels
from edgekv.kvcache import registry, schemes
from edgekv.plugin import Geometry, KVCache, Workspace

PACKAGE = ROOT / "examples" / "scheme_package"
generated = functools.partial(text, sampling=SamplingParams(0.0))


def install(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """Writes what pip writes for importlib.metadata: the package's name, and its entry point."""
    facts = folder / "edgekv_bf16-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: edgekv-bf16\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{entry}\n")
    monkeypatch.syspath_prepend(str(folder))


def forget_packages() -> None:
    """Has schemes of packages looked for anew, as in a new process."""
    registry._load.cache_clear()


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    """Has schemes of packages looked for before this test, and anew after it."""
    forget_packages()
    known = dict(CACHES)
    yield
    CACHES.clear()
    CACHES.update(known)
    forget_packages()


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the example with the entry point that its own pyproject.toml names."""
    text = (PACKAGE / "pyproject.toml").read_text()
    table = re.search(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)+)', text, re.MULTILINE)
    assert table
    assert table[1] == registry.ENTRY_POINTS
    install(tmp_path, monkeypatch, table[2].replace('"', ""))
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.mark.usefixtures("installed")
def test_it_is_found_by_its_name_and_listed(cli: Cli) -> None:
    assert "bf16" not in CACHES
    assert CacheSpec.parse("bf16:rounding=down").scheme is CACHES["bf16"]
    assert [*schemes()][-3:] == ["bf16", "bf16_old", "latest"]
    facts = {entry["name"]: entry for entry in json.loads(cli("schemes", "--json").out)}["bf16"]
    assert facts["options"] == {"rounding": "nearest"}
    assert facts["bytes_per_token_per_kv_head"] == 4 * 128
    with raises(CacheError, field="kv"):
        CacheSpec.parse("bf16:rounding=up")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("rounding", "error"), [("nearest", 2**-8), ("down", 2**-7)])
def test_it_rounds_as_it_says(rounding: str, error: float) -> None:
    spec = CacheSpec.parse(f"bf16:rounding={rounding}")
    cache = spec.scheme(Geometry(2, 2, 16, 100), spec.config)
    cache.allocate(numpy_kernels(None), Workspace())
    x = np.random.default_rng(0).standard_normal((2, 100, 16)).astype(np.float32)
    cache.append_prefill(x, -x)
    kept = cache.key_codec.decode(0, 100)
    assert error / 2 < np.abs(kept / x - 1).max() <= error
    np.testing.assert_array_equal(cache.value_codec.decode(0, 100), -kept)
    exact = np.float32([[[1 + k / 128 for k in range(16)]]] * 2)  # 8 bits of precision hold these
    cache.truncate(0)
    cache.append_prefill(exact, exact)
    np.testing.assert_array_equal(cache.key_codec.decode(0, 1), exact)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_a_session_is_restored(device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the package's compiled loop reads its tokens, elsewhere `decode`."""
    straight = Session.load("demo", kv="bf16", ctx=256, device=device)
    calls, codec = [], CACHES["bf16"].codecs.__globals__["BFloat16Codec"]
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda *arguments: calls.append(device) or decode(*arguments))
    whole, saved = generated(straight, "It was a dark night", 40), straight.fork()
    first = generated(saved, "It was a dark night", 15)
    saved.save(tmp_path / "session")
    forget_packages()
    del CACHES["bf16"]
    restored = Session.restore(tmp_path / "session", "demo", device=device)
    assert restored.plan.kv.scheme.name == "bf16"
    assert first + generated(restored, [], 25) == whole
    assert bool(calls) == (device == "numpy")
    exact = Session.load("demo", kv="dense:dtype=f32", ctx=256, device=device)
    assert generated(exact, "It was a dark night", 15) == first


def test_its_session_without_the_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(PACKAGE))
        import edgekv_bf16

        register(edgekv_bf16.BFloat16)
        with Session.load("demo", kv="bf16", ctx=64) as session:
            generated(session, "Once", 3)
            session.save(tmp_path / "session")
    del CACHES["bf16"]
    with pytest.raises(SessionError, match="kv='bf16': unknown"):
        Session.restore(tmp_path / "session", "demo")


@pytest.mark.usefixtures("installed")
def test_on_the_command_line(tmp_path: pathlib.Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    kept = tmp_path / "session"
    run = ["run", "--ctx", "256", "--max-new-tokens", "12", "--session", str(kept)]
    assert "kv bf16" in cli(*run, "--kv", "bf16", "--prompt", "It was a dark night").err
    cli(*run)
    book = tmp_path / "text"
    book.write_text("The old man walked along the road to the village, and the rain fell. " * 12)
    command = ["eval", "--text", str(book), "--kv", "bf16", "--ctx", "128"]
    cli(*command, "--json", tmp_path / "facts")
    (ours,) = json.loads((tmp_path / "facts").read_text())["results"]
    assert ours["kv"] == "bf16:rounding=nearest"
    assert ours["perplexity_ratio"] == pytest.approx(1, abs=0.01)
    assert 0 < ours["kl"] < 1e-4


BROKEN = {
    "gone": ("", "ModuleNotFoundError"),
    "leaves": ("raise SystemExit(3)", "SystemExit: 3"),
    "no scheme": ("class BFloat16: pass", "is no KV scheme"),
    "a name of ours": ("from edgekv_bf16 import *\nBFloat16.name = 'dense'", "the name 'dense' is taken"),
    "no layout": ("from edgekv_bf16 import *\nBFloat16.layout = lambda self: 1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_package_that_is_broken_is_left_out_of_lists(
    source: str, reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A line says so, and its scheme is refused where it is named."""
    install(tmp_path, monkeypatch, "bf16 = edgekv_broken:BFloat16")
    shutil.copy(PACKAGE / "edgekv_bf16.py", tmp_path)
    if source:
        (tmp_path / "edgekv_broken.py").write_text(source)
    for module in ("edgekv_broken", "edgekv_bf16"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    known = list(CACHES)
    assert CacheSpec.parse("dense")  # ours need no package
    with raises(CacheError, "'bf16' of the package edgekv-bf16 can't be loaded", reason, field="kv"):
        CacheSpec.parse("bf16")
    assert list(schemes()) == known
    for command in (["schemes"], ["schemes", "--json"], ["budget", "--kv", "list"]):
        (line,) = cli(*command).err.splitlines()
        assert line.startswith("edgekv: left out: the KV scheme 'bf16' of the package edgekv-bf16 can't be loaded")


def test_registering() -> None:
    dense = CACHES["dense"]
    assert register(dense) is dense
    other, nameless = type("Other", (dense,), {}), type("Nameless", (KVCache,), {})
    for scheme, why in ((other, "'dense' is taken by"), (int, "no KV scheme"), (nameless, "Nameless has no name")):
        with pytest.raises(CacheError, match=why):
            register(scheme)
    other.name = "other"
    assert register(other) is CACHES["other"]
    with raises(CacheError, field="kv") as caught:
        CacheSpec.parse("nowhere")
    assert "other" in caught.value.accepted


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kv", ["bf16_old:window=16", "latest:budget=96"])
def test_policies_of_a_package(kv: str, tmp_path: pathlib.Path) -> None:
    """Planned bytes are allocated; sessions are saved, restored and rewound; what has left is not seen."""
    session = Session.load("demo", kv=kv, ctx=300)
    assert session.nbytes == session.plan.cache_bytes
    whole = generated(session, "It was a dark night", 80)
    exact = session.fork(kv="dense:dtype=f32")
    assert generated(exact, "It was a dark night", 40) == whole[:40]
    saved = session.fork()
    first = generated(saved, "It was a dark night", 50)
    saved.save(tmp_path / "session")
    assert first + generated(Session.restore(tmp_path / "session", "demo"), [], 30) == whole
    again = session.tokens[:20]
    session.rewind(19)
    assert generated(session, again[19:], 20) == generated(session.fork(), again, 20)
    assert len(generated(session, again * 8, 60)) == 60
    cache = session.caches[0]
    if kv.startswith("latest"):
        (ring,) = cache.segments()
        assert (ring.stop, ring.position) == (96, cache.n_seen - 96)
    else:
        assert cache.n_packed > 32


def test_only_public_names_are_used() -> None:
    """The examples import what `edgekv` lists, and from `edgekv.plugin`."""
    public = {"edgekv": {*edgekv.__all__}, "edgekv.plugin": {*plugin.__all__}}
    for file in {*(ROOT / "examples").rglob("*.py")} - {ROOT / "examples" / "minimal.py"}:
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.Import) or "edgekv" not in node.names[0].name, file
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("edgekv."):
                assert {each.name for each in node.names} <= public[str(node.module)], file
    assert all(getattr(plugin, name) for name in plugin.__all__)
    assert DEMO.is_dir()
    assert str(PACKAGE) not in sys.path


def test_what_plugins_build_on_loads_no_compiler() -> None:
    """Until a loop is asked for, so that the names of a package's schemes are known at once."""
    loaded = "print('numba' in sys.modules)"
    code = f"import sys, edgekv.plugin; {loaded}; edgekv.plugin.loops; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = plugin.nothing
