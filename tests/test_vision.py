"""Images in prompts: transformers' logits, every scheme, rewinds, files, overflow, the command line."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from types import SimpleNamespace

import golden_cases
import numpy as np
import numpy.typing as npt
import pytest
import vision_cases as cases
from cuda_cases import OnDevice
from helpers import SESSION_KV, raises

from edgekv import Chat, Embeddings, SamplingParams, Session
from edgekv.cli import main
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, ContextError, EdgeKVError, ImageError
from edgekv.kernels.arrays import to_host
from edgekv.server.prompts import RequestEncoder
from edgekv.server.requests import ChatRequest, ImageUrl, Message, Part
from edgekv.text.template import ChatTemplate
from edgekv.vision.images import picture
from edgekv.weights.cuda import DeviceWeights

PIL = pytest.importorskip("PIL", reason="needs Pillow: pip install 'edgekv[vision]'")
from PIL import Image  # noqa: E402

F32 = npt.NDArray[np.float32]
GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "vision.npz")
IMAGES = [Image.fromarray(cases.pixels(*size)) for size in cases.SIZES]
N = cases.N_TOKENS
TEXT = "w17 w4 <image> w9 <image> w33 w34 w60"  # cases.PROMPT
WORDS = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
VISUAL = "visual1:bits=1,group=head,quantile=0.02,text=f16"
FIRST, SECOND = (3, 3 + N), (4 + N, 4 + 2 * N)  # where the images of TEXT are


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return cases.write_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def copied(folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(folder, tmp_path / "llava"))


@pytest.fixture(scope="module")
def base(folder: pathlib.Path) -> Session:
    return Session.load(folder, kv="dense:dtype=f32", weights="f32")


def text(session: Session, prompt: object, n: int, **options: object) -> list[int]:
    """The tokens of a greedy answer."""
    return [step.token for step in session.generate(prompt, max_new_tokens=n, temperature=0.0, **options)]


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_logits_are_transformers(folder: pathlib.Path, device: str) -> None:
    session = Session.load(folder, kv="dense:dtype=f32", weights="f32", device=device)
    logits = session.logits(session.prompt(TEXT, IMAGES[:2]))
    np.testing.assert_allclose(logits, GOLDEN["logits"], atol=2e-5)


@pytest.mark.parametrize(("newer", "apart"), [(True, False), (False, True)])
def test_the_same_model_in_other_files(newer: bool, apart: bool, tmp_path: pathlib.Path) -> None:
    folder = cases.write_model(tmp_path / "m", newer=newer, apart=apart)
    if newer:
        settings = (folder / "preprocessor_config.json").rename(folder / "processor_config.json")
        settings.write_text(json.dumps({"image_processor": json.loads(settings.read_text())}))
    session = Session.load(folder, kv="dense:dtype=f32", weights="f32")
    np.testing.assert_allclose(session.logits(session.prompt(TEXT, IMAGES[:2])), GOLDEN["logits"], atol=2e-5)


def test_pieces_prefill_and_logits_agree(base: Session) -> None:
    pieces = base.prompt(TEXT, IMAGES[:2])
    assert [len(piece.rows) if isinstance(piece, Embeddings) else piece for piece in pieces] == [
        1, 17, 4, N, 9, N, 33, 34, 60
    ]  # fmt: skip
    base.reset()
    whole = base.logits(pieces)
    for cut in (2, 4, 7):  # before, behind and after the images
        base.reset()
        base.logits(pieces[:cut])
        np.testing.assert_allclose(base.prefill(pieces[cut:]), whole[-1], atol=1e-4)
    assert base.tokens[3 : 3 + N] == [cases.IMAGE_TOKEN] * N
    assert [(span.start, span.stop) for span in base._state.spans] == [FIRST, SECOND]
    base.reset()
    assert base._state.spans == []


def test_without_placeholders_images_come_first(base: Session) -> None:
    base.reset()
    expected = base.logits(base.prompt("<image> <image> w9 w8", IMAGES[:2]))
    base.reset()
    assert base.prompt("w9 w8", IMAGES[:2])[0] == 1  # behind the beginning-of-text token
    np.testing.assert_array_equal(base.logits(base.prompt("w9 w8", IMAGES[:2])), expected)
    again = base.prompt("w9", IMAGES[:1])  # in the middle of a conversation there is none
    assert isinstance(again[0], Embeddings)
    base.reset()


def test_placeholders_and_images_must_be_as_many(base: Session) -> None:
    for prompt, n in ((TEXT, 1), (TEXT, 3), ("<image>", 2)):
        with pytest.raises(ImageError, match=rf"token 95, for {n} image\(s\): give one for each"):
            base.generate(prompt, images=IMAGES[:n], temperature=0.0)


@pytest.mark.parametrize("kv", [*SESSION_KV, VISUAL])
def test_every_scheme_takes_images(base: Session, kv: str) -> None:
    session = base.fork(kv=kv)
    pieces = base.prompt(TEXT, IMAGES[:2])
    first, second = text(session, pieces, 6), text(session, [4, base.vision(picture(IMAGES[2])), 8], 4)
    assert (len(first), len(second)) == (6, 4)
    assert session._state.n_cached == len(session.tokens) - 1 == 7 + 2 * N + 6 + 2 + N + 3
    session.reset()
    assert text(session, pieces, 6) == first


@pytest.mark.parametrize(("kv", "atol"), [("dense:dtype=f32", 5e-4), ("visual1:bits=8,quantile=0", 0.1)])
def test_rewinding_into_an_image_computes_the_rest_of_it_again(base: Session, kv: str, atol: float) -> None:
    session = base.fork(kv=kv)
    pieces = base.prompt(TEXT, IMAGES[:2])
    whole = session.prefill(pieces)
    embed = session._runner.decoder.embed
    flat = np.concatenate([each.rows if isinstance(each, Embeddings) else embed([each], 0) for each in pieces])
    for n in (SECOND[1] - 1, FIRST[1], FIRST[0] + 5, FIRST[0]):
        session.rewind(n)
        np.testing.assert_allclose(session.prefill([Embeddings(flat[n:])]), whole, atol=atol)


def test_an_interrupted_prefill_leaves_no_trace(base: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    session = base.fork(kv=VISUAL)
    pieces = base.prompt(TEXT, IMAGES[:2])
    expected = session.prefill(pieces)
    session.reset()

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(pieces, progress=stop)
    assert (session.tokens, session._state.spans, session._state.n_cached) == ([], [], 0)
    np.testing.assert_array_equal(session.prefill(pieces), expected)


def test_visual1_packs_the_images_alone(base: Session) -> None:
    session = base.fork(kv=VISUAL, ctx=100)
    text(session, base.prompt(TEXT, IMAGES[:2]), 1)
    cache, g = session.caches[0], session.caches[0].geometry
    assert cache.name == "visual1"
    session.reset()
    text(session, TEXT, 3, images=IMAGES[:2])
    assert [(span.start, span.stop) for span in cache.spans] == [FIRST, SECOND]
    report = session.report()
    visual = 2 * (2 * N * g.n_kv_heads * g.head_dim // 8 + 2 * 2 * 2 * g.n_kv_heads)
    exact = (100 - 2 * N) * g.n_kv_heads * g.head_dim * 4
    assert report.cache_bytes == (visual + exact) * base.config.n_layers
    assert (report.images.n, report.images.tokens) == (2, 2 * N)
    assert report.images.seconds > 0
    text(session, [5], 1)
    assert session.report().images is None


@pytest.mark.parametrize("kv", ["onebit", VISUAL])
def test_a_saved_conversation_goes_on(base: Session, kv: str, tmp_path: pathlib.Path) -> None:
    session = base.fork(kv=kv)
    text(session, base.prompt(TEXT, IMAGES[:2]), 3)
    session.save(tmp_path / "a.kv")
    restored = Session.restore(tmp_path / "a.kv", session)
    for span, other in zip(session._state.spans, restored._state.spans, strict=True):
        np.testing.assert_array_equal(span.rows, other.rows)
    for each in (session, restored):
        each.rewind(SECOND[1] - 4)
    copied = base.fork(kv=kv)
    copied.copy_from(restored)
    again = [text(each, [33, 34, 60], 5) for each in (session, restored, copied)]
    assert again[0] == again[1] == again[2]


def test_no_text_has_the_token_of_an_image(base: Session) -> None:
    """However likely the model finds it: the next prompt would have more places than images."""
    session, sampling = base.fork(), SamplingParams(0.0, logit_bias={cases.IMAGE_TOKEN: 100})
    anything = SimpleNamespace(allowed=lambda logits: logits, accept=lambda token: False)
    for constraint in (None, anything):
        steps = session.generate("w5 w9", max_new_tokens=4, sampling=sampling, constraint=constraint)
        made = [step.token for step in steps]
        assert made
        assert cases.IMAGE_TOKEN not in made


def test_an_image_in_a_text_without_images_is_text(base: Session) -> None:
    session, tokenizer = base.fork(), base.require_tokenizer()
    said = tokenizer.encode("w5 <", bos=True) + tokenizer.encode("image> w9", bos=False)
    assert session.prompt("w5 <image> w9") == session.align("w5 <image> w9") == said
    list(session.generate("w5 <image> w9", max_new_tokens=1, temperature=0.0))
    assert session.tokens[:-1] == said
    np.testing.assert_array_equal(session.embed("w5 <image> w9"), session.embed(said))
    with pytest.raises(ImageError, match="placeholder"):
        session.embed([1, cases.IMAGE_TOKEN])
    chat = Chat(session.fork(), ChatTemplate(WORDS, tokenizer))
    list(chat.ask("w5 <image> w9", max_new_tokens=1))
    assert cases.IMAGE_TOKEN not in chat.session.tokens[:-1]
    server = RequestEncoder(chat.template, tokenizer, 64, 96)
    assert server.ids("w5 <image> w9", "input") == said
    parts = [Part("image_url", image_url=ImageUrl("data:image/png;base64,AAAA")), Part("text", "<image> w5")]
    turns = [Message("user", content) for content in (parts, "w5 <image>")]
    (encoded,) = server.encode(ChatRequest(model="m", messages=turns))
    assert encoded.ids.count(cases.IMAGE_TOKEN) == 1


def test_a_chat_with_pictures_slides_by_whole_turns(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The system message stays, pictures leave whole, and one that can't fit is an error."""
    session = Session.load(folder, weights="f32", ctx=64, overflow="slide")
    chat = Chat(session, ChatTemplate(WORDS, session.require_tokenizer()), "w33 w34 w35 w36 w37")
    system = session.encode("w33 w34 w35 w36 w37")
    IMAGES[0].save(tmp_path / "a.png")
    for i in range(5):
        list(chat.ask(f"w{50 + i}", images=[tmp_path / "a.png"], max_new_tokens=7))
        assert session.tokens[: len(system)] == system
        assert {len(span.rows) for span in session._state.spans} == {N}
        assert session.report().images is None if i else session.report().images.tokens == N
    assert sum(bool(message.get("dropped")) for message in chat.messages) >= 4
    list(chat.ask("w9", max_new_tokens=150, stop=["never"]))
    assert session.n_dropped > 0
    assert session.tokens[: len(system)] == system
    assert {len(span.rows) for span in session._state.spans} <= {N}
    restored = session.fork()
    restored.copy_from(session)
    assert restored._state.n_first == session._state.n_first == len(system)
    before = len(chat.messages)
    with raises(ContextError, field="ctx"):
        list(chat.ask("w9", images=4 * [tmp_path / "a.png"]))
    assert len(chat.messages) == before


def test_a_server_or_chat_never_takes_an_image_for_text(base: Session) -> None:
    session = base.fork()
    session.prefill(base.prompt(TEXT, IMAGES[:2]))
    ids = list(session.tokens)
    assert session.align([*ids, 5]) == [*ids[FIRST[0] :], 5]
    with pytest.raises(ImageError, match="placeholder"):
        session.generate([*ids[FIRST[0] :], 5], temperature=0.0)


def test_embeddings_of_another_shape(base: Session) -> None:
    for shape in ((4,), (0, 64), (4, 63), (1, 4, 64)):
        with pytest.raises(ContextError, match=r"this model takes \(n, 64\)"):
            base.prefill([1, Embeddings(np.zeros(shape, np.float32))])


def test_embeddings_on_a_device(device: OnDevice, tmp_path: pathlib.Path) -> None:
    model = Model.open(golden_cases.write_checkpoint("gpt2", tmp_path / "model"))
    store = model.store(model.weight_format("f32"))
    cuda = Decoder(CudaBackend(DeviceWeights(store, device.driver, None), device.driver, 1), 48)
    reference = find_device("numpy").decoder(model, model.weight_format("f32"), 48, 1, None)
    rows, xs = np.random.default_rng(0).standard_normal((5, model.config.hidden_size), np.float32), []
    for decoder in (cuda, reference):
        x = decoder.embed(range(9), 20)
        decoder.place(rows, x, 20, 3)
        xs.append(to_host(x))
    np.testing.assert_allclose(*xs, atol=1e-6)


def graph(content: bytes) -> object:
    return lambda folder: (folder / "vision.onnx").write_bytes(content)


def projector_of_another_decoder(folder: pathlib.Path) -> None:
    weights = {f"multi_modal_projector.{n}": a for n, a in cases.projector().items()}
    weights["multi_modal_projector.linear_2.weight"] = np.zeros((60, 64), np.float32)
    cases.save_file(weights, folder / "projector.safetensors")


def without(name: str) -> object:
    return lambda folder: (folder / name).unlink()


def config(**changes: object) -> object:
    return lambda folder: (folder / "config.json").write_text(json.dumps(cases.CONFIG | changes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without("vision.onnx"), ImageError, "has no vision.onnx, without which images can't be read"),
        (without("preprocessor_config.json"), ImageError, "has no preprocessor_config.json"),
        (graph(b"no graph"), CheckpointError, r"vision.onnx: onnxruntime can't open it \(.*\); export it again"),
        (graph(cases.vision_onnx(30, 30)), CheckpointError, r"takes images of \[30, 30\]"),
        (graph(cases.vision_onnx(name="image")), CheckpointError, r"inputs .*; accepted: pixel_values"),
        (graph(cases.vision_onnx(endless=True)), CheckpointError, "onnxruntime can't run it"),
        (projector_of_another_decoder, CheckpointError, r"linear_2.weight' has shape \(60, 64\)"),
        (config(projector_hidden_act="tanh"), ConfigError, "activation 'tanh' is not supported"),
        (config(image_token_index=None), ImageError, "takes no images, its model_type is llava"),
    ],
)
def test_models_that_lack_a_part(
    copied: pathlib.Path, change: object, error: type[EdgeKVError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekv.vision.model.MAX_SECONDS", 0.3)
    change(copied)
    session = Session.load(copied, weights="f32")
    assert session.logits([1, 5, 6]).shape == (3, 96)  # text needs none of it
    with pytest.raises(error, match=message) as raised:
        session.generate([1, 5], images=IMAGES[:1], temperature=0.0)
    assert "\n" not in str(raised.value)


def test_without_onnxruntime(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    session = Session.load(folder, weights="f32")
    with pytest.raises(ImageError, match=r"need onnxruntime, .*: pip install 'edgekv\[vision\]'"):
        session.generate([1, 5], images=IMAGES[:1], temperature=0.0)


def test_an_unknown_placeholder(copied: pathlib.Path) -> None:
    config(image_token_index=94)(copied)
    with pytest.raises(ImageError, match=r"does not read <image> as the model's image token 94"):
        Session.load(copied, weights="f32").generate("<image> w5", images=IMAGES[:1], temperature=0.0)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["run", "--weights", "f32", "--max-new-tokens", "4", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_run(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], base: Session
) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    IMAGES[0].save(files[0])
    IMAGES[1].convert("CMYK").save(files[1])
    options = [option for path in files for option in ("--image", path)]
    report = tmp_path / "report.json"
    command, saved = ("--model", folder, "--session", tmp_path / "a.kv"), ("--kv", VISUAL, "--json", report)
    status, out, err = run(capsys, *command, "--prompt", TEXT, *options, *saved)
    assert status == 0
    assert out.startswith("w")
    assert f"note        {files[1]} is CMYK: converted to RGB without a colour profile" in err.splitlines()
    assert json.loads(report.read_text())["images"]["n"] == 2
    status, out, err = run(capsys, *command, "--prompt", "w8", "--image", files[0])
    assert status == 0
    assert "images      1, 16 tokens" in err


def test_a_store_sees_too(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    IMAGES[0].save(tmp_path / "a.png")
    store = tmp_path / "store"
    assert main(["quantize", "--model", str(folder), "--weights", "f32", "--output", str(store)]) == 0
    capsys.readouterr()
    options = "--prompt", "<image> w8", "--image", tmp_path / "a.png", "--greedy"
    outs = [run(capsys, "--model", model, *options)[:2] for model in (folder, store)]
    assert outs[0] == outs[1] == (0, outs[0][1])
