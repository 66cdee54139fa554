"""Image files and their preprocessing; images in prompts: transformers' logits, every scheme, rewinds."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import struct
import zlib
from collections.abc import Callable
from types import SimpleNamespace

import golden_cases
import numpy as np
import pytest
import vision_cases as cases
from cuda_cases import OnDevice
from helpers import SESSION_KV, Cli, embedding_spans, n_cached, raises, text

from edgekv import Chat, Embeddings, SamplingParams, Session
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, ContextError, EdgeKVError, ImageError
from edgekv.kernels.arrays import to_host
from edgekv.server.prompts import RequestEncoder
from edgekv.server.requests import ChatRequest, ImageUrl, Message, Part
from edgekv.text.template import ChatTemplate
from edgekv.vision.images import Preprocess, open_image
from edgekv.weights.cuda import DeviceWeights

PIL = pytest.importorskip("PIL", reason="needs Pillow: pip install 'edgekv[vision]'")
from PIL import GifImagePlugin, Image  # noqa: E402

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "vision.npz")
IMAGES = [Image.fromarray(cases.pixels(*size)) for size in cases.SIZES]
N = cases.N_TOKENS
TEXT = "w17 w4 <image> w9 <image> w33 w34 w60"  # cases.PROMPT
WORDS = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
VISUAL = "visual1:bits=1,group=head,quantile=0.02"
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


@pytest.mark.parametrize(
    ("files", "device"), [({}, "numpy"), ({}, "cpu"), ({"newer": True}, "cpu"), ({"apart": True}, "cpu")], ids=str
)
def test_logits_are_transformers(files: dict[str, bool], device: str, tmp_path: pathlib.Path) -> None:
    folder = cases.write_model(tmp_path / "m", **files)
    if files.get("newer"):
        settings = (folder / "preprocessor_config.json").rename(folder / "processor_config.json")
        settings.write_text(json.dumps({"image_processor": json.loads(settings.read_text())}))
    session = Session.load(folder, kv="dense:dtype=f32", weights="f32", device=device)
    logits = session.logits(session.encode_prompt(TEXT, IMAGES[:2]))
    np.testing.assert_allclose(logits, GOLDEN["logits"], atol=2e-5)


def test_pieces_prefill_and_logits_agree(base: Session) -> None:
    pieces = base.encode_prompt(TEXT, IMAGES[:2])
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
    assert [(span.start, span.stop) for span in embedding_spans(base)] == [FIRST, SECOND]
    base.reset()
    assert embedding_spans(base) == []


def test_without_placeholders_images_come_first(base: Session) -> None:
    base.reset()
    expected = base.logits(base.encode_prompt("<image> <image> w9 w8", IMAGES[:2]))
    base.reset()
    assert base.encode_prompt("w9 w8", IMAGES[:2])[0] == 1  # behind the beginning-of-text token
    np.testing.assert_array_equal(base.logits(base.encode_prompt("w9 w8", IMAGES[:2])), expected)
    again = base.encode_prompt("w9", IMAGES[:1])  # in the middle of a conversation there is none
    assert isinstance(again[0], Embeddings)
    base.reset()


def test_placeholders_and_images_must_be_as_many(base: Session) -> None:
    for prompt, n in ((TEXT, 1), (TEXT, 3), ("<image>", 2)):
        with pytest.raises(ImageError, match=rf"token 95, for {n} image\(s\): give one for each"):
            base.generate(prompt, images=IMAGES[:n], temperature=0.0)


@pytest.mark.parametrize("kv", [*SESSION_KV, VISUAL])
def test_every_scheme_takes_images(base: Session, kv: str) -> None:
    session = base.fork(kv=kv)
    pieces = base.encode_prompt(TEXT, IMAGES[:2])
    first, second = text(session, pieces, 6), text(session, [4, base.vision(open_image(IMAGES[2])), 8], 4)
    assert (len(first), len(second)) == (6, 4)
    assert n_cached(session) == len(session.tokens) - 1 == 7 + 2 * N + 6 + 2 + N + 3
    session.reset()
    assert text(session, pieces, 6) == first


@pytest.mark.parametrize(("kv", "atol"), [("dense:dtype=f32", 5e-4), ("visual1:bits=8,quantile=0", 0.1)])
def test_rewinding_into_an_image_computes_the_rest_of_it_again(base: Session, kv: str, atol: float) -> None:
    session = base.fork(kv=kv)
    pieces = base.encode_prompt(TEXT, IMAGES[:2])
    whole = session.prefill(pieces)
    weights = session.model.weights
    flat = np.concatenate(
        [each.rows if isinstance(each, Embeddings) else weights.rows("embed", [each]) for each in pieces]
    )
    for n in (SECOND[1] - 1, FIRST[1], FIRST[0] + 5, FIRST[0]):
        session.rewind(n)
        np.testing.assert_allclose(session.prefill([Embeddings(flat[n:])]), whole, atol=atol)


@pytest.mark.parametrize("kv", ["onebit", VISUAL])
def test_a_saved_conversation_goes_on(base: Session, kv: str, tmp_path: pathlib.Path) -> None:
    session = base.fork(kv=kv)
    text(session, base.encode_prompt(TEXT, IMAGES[:2]), 3)
    session.save(tmp_path / "a.kv")
    restored = Session.restore(tmp_path / "a.kv", session)
    for span, other in zip(embedding_spans(session), embedding_spans(restored), strict=True):
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
    assert session.encode_prompt("w5 <image> w9") == session.align("w5 <image> w9") == said
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
        assert {len(span.rows) for span in embedding_spans(session)} == {N}
        assert session.report().images is None if i else session.report().images.tokens == N
    assert sum(bool(message.get("dropped")) for message in chat.messages) >= 4
    steps = list(chat.ask("w9", max_new_tokens=150, stop=["never"]))
    assert steps[-1].finish_message == "context full (64 tokens)"
    assert session.n_dropped == 0
    assert session.tokens[: len(system)] == system
    assert {len(span.rows) for span in embedding_spans(session)} <= {N}
    before = len(chat.messages)
    with raises(ContextError, field="ctx"):
        list(chat.ask("w9", images=4 * [tmp_path / "a.png"]))
    assert len(chat.messages) == before


def test_a_server_or_chat_never_takes_an_image_for_text(base: Session) -> None:
    session = base.fork()
    session.prefill(base.encode_prompt(TEXT, IMAGES[:2]))
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
        decoder.insert_embeddings(rows, x, 20, 3)
        xs.append(to_host(x))
    np.testing.assert_allclose(*xs, atol=1e-6)


def graph(content: bytes) -> object:
    return lambda folder: (folder / "vision.onnx").write_bytes(content)


def projector_of_another_decoder(folder: pathlib.Path) -> None:
    weights = {f"multi_modal_projector.{n}": a for n, a in cases.projector().items()}
    weights["multi_modal_projector.linear_2.weight"] = np.zeros((60, 64), np.float32)
    cases.save_file(weights, folder / "projector.safetensors")


def config(**changes: object) -> object:
    return lambda folder: (folder / "config.json").write_text(json.dumps(cases.CONFIG | changes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: (folder / "vision.onnx").unlink(), ImageError, "has no vision.onnx"),
        (graph(b"no graph"), CheckpointError, r"vision.onnx: onnxruntime can't open it \(.*\); export it again"),
        (graph(cases.vision_onnx(30, 30)), CheckpointError, r"takes images of \[30, 30\]"),
        (graph(cases.vision_onnx(endless=True)), CheckpointError, "onnxruntime can't run it"),
        (projector_of_another_decoder, CheckpointError, r"linear_2.weight' has shape \(60, 64\)"),
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
    with raises(error, match=message):
        session.generate([1, 5], images=IMAGES[:1], temperature=0.0)


def test_an_unknown_placeholder(copied: pathlib.Path) -> None:
    config(image_token_index=94)(copied)
    with pytest.raises(ImageError, match=r"does not read <image> as the model's image token 94"):
        Session.load(copied, weights="f32").generate("<image> w5", images=IMAGES[:1], temperature=0.0)


def test_a_store_sees_too(folder: pathlib.Path, tmp_path: pathlib.Path, cli: Cli) -> None:
    store = tmp_path / "store"
    cli("quantize", "--model", folder, "--weights", "f32", "--output", store)
    texts = [text(Session.load(p, weights="f32"), "<image> w8", 4, images=IMAGES[:1]) for p in (folder, store)]
    assert texts[0] == texts[1]


# Image files: what is read, converted and refused; preprocessing as transformers does it

RGB = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
GREY16 = (np.arange(5 * 7, dtype=np.uint16) * 1801).reshape(5, 7)


def png(width: int, height: int, bits: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG by hand: Pillow writes none of these."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def rgb16_png() -> bytes:
    rows = (RGB.astype(">u2") * 256 + 77).astype(">u2")
    return png(7, 5, 16, data=b"".join(b"\0" + row.tobytes() for row in rows))


def write(path: pathlib.Path, content: bytes | Callable[[pathlib.Path], object]) -> pathlib.Path:
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    return path


def test_rgb_is_read_as_it_is(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / f"a.{suffix}" for suffix in ("png", "bmp", "tiff", "ppm", "webp")):
        Image.fromarray(RGB).save(path, lossless=True)
        read = open_image(path)
        np.testing.assert_array_equal(np.asarray(read), RGB)
        assert read.mode == "RGB"
        assert open_image(read) is read
    read = open_image(Image.fromarray(RGB).convert("L"))
    assert (read.mode, read.size) == ("RGB", (7, 5))


def test_photos_are_turned_upright(tmp_path: pathlib.Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(np.asarray(open_image(tmp_path / "a.png")), np.rot90(RGB, -1))


def animated(path: pathlib.Path) -> None:
    frames = [Image.fromarray(np.full((5, 7, 3), 60 * i, np.uint8)) for i in range(3)]
    frames[1].save(path, save_all=True, append_images=[frames[0], frames[2]], loop=0, format="GIF")


def test_frames_are_not_counted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would read all of a file with a million frames."""
    animated(tmp_path / "a.gif")
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", property(lambda image: pytest.fail("counted")))
    assert open_image(tmp_path / "a.gif").mode == "RGB"


def transparent(path: pathlib.Path) -> None:
    Image.fromarray(np.dstack([RGB, np.full((5, 7), 9, np.uint8)])).save(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.gif", animated, np.full((5, 7, 3), 60, np.uint8)),
        ("a.jpg", lambda path: Image.new("CMYK", (7, 5)).save(path), None),
        ("a.png", lambda path: Image.fromarray(GREY16).save(path), GREY16 >> 8),
        ("a.png", rgb16_png(), RGB),
        ("a.png", transparent, RGB),
    ],
    ids=["animated", "cmyk", "grey16", "rgb16", "transparent"],
)
def test_what_is_read_of_other_images(
    name: str,
    content: bytes | Callable[[pathlib.Path], object],
    expected: np.ndarray | None,
    tmp_path: pathlib.Path,
) -> None:
    read = open_image(write(tmp_path / name, content))
    assert (read.mode, read.size) == ("RGB", (7, 5))
    if expected is not None:
        expected = expected if expected.ndim == 3 else expected[:, :, None].repeat(3, 2)
        np.testing.assert_array_equal(np.asarray(read), expected)


def cut_off(path: pathlib.Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])


BAD = {
    "text": (b"this is no image", "is no image that can be read; accepted: PNG, JPEG"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image that can be read"),
    "cut off": (cut_off, "can't be read whole"),
    "no data": (png(9, 9), "can't be read whole"),
    "no pixels": (png(0, 5), "no image that can be read|at least one"),
    "big": (png(10_000, 10_000), r"has 10000 x 10000 pixels; accepted: up to 64,000,000: make it smaller"),
    "bomb": (png(60_000, 60_000), r"has more than [0-9,]+ pixels; accepted: up to 64,000,000"),
    "float": (lambda path: Image.fromarray(RGB[..., 0] * np.float32(0.1)).save(path, "TIFF"), "floating-point"),
    "missing": (lambda path: None, "No such file"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
}


def test_bad_files_are_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    for name, (content, message) in BAD.items():
        path = write(tmp_path / f"{name}.png", content)
        with raises(ImageError, f"{path}: ", match=message):
            open_image(path)


def read_settings(folder: pathlib.Path, settings: object) -> Preprocess:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(settings))
    return Preprocess.read(path)


@pytest.mark.parametrize("name", cases.PREPROCESS)
def test_values_are_transformers(name: str, tmp_path: pathlib.Path) -> None:
    preprocess = read_settings(tmp_path, cases.PREPROCESS[name])
    for i, size in enumerate(cases.SIZES):
        values, expected = preprocess(open_image(Image.fromarray(cases.pixels(*size)))), GOLDEN[f"{name}/{i}"]
        assert (values.dtype, values.shape) == (np.float32, expected.shape)
        assert preprocess.output == expected.shape[1:]
        np.testing.assert_allclose(values, expected, atol=1e-6)


def test_other_configs_are_refused(tmp_path: pathlib.Path) -> None:
    sizes = {"size": {"longest_edge": 30}}, {"size": 1 << 20}, {"size": 10**400}
    others = {"crop_size": 0}, {"image_mean": [0.5]}, {"do_pad": True}, {"image_std": [0, 1, 1]}
    for settings in ({}, {"image_processor": []}, *sizes, *({"size": 30} | other for other in others)):
        with pytest.raises(ConfigError, match=r"preprocessor_config.json: is not what .*; copy the model's own"):
            read_settings(tmp_path, settings)


def test_a_strip_would_become_too_long(tmp_path: pathlib.Path) -> None:
    preprocess = read_settings(tmp_path, {"size": {"shortest_edge": 336}, "crop_size": 336})
    with raises(ImageError, "the image: has 30000 x 1 pixels, ", " would see 10080000 x 336; accepted: up to"):
        preprocess(open_image(Image.new("RGB", (30_000, 1))))
