"""Preprocessing: transformers' values for the same images, and configs that it can't do."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import vision_cases as cases

from edgekv.errors import ConfigError, ImageError
from edgekv.vision import picture
from edgekv.vision.images import Preprocess

PIL = pytest.importorskip("PIL", reason="needs Pillow: pip install 'edgekv[vision]'")
from PIL import Image  # noqa: E402

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "vision.npz")


def read(folder: pathlib.Path, settings: object) -> Preprocess:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(settings))
    return Preprocess.read(path)


@pytest.mark.parametrize("name", cases.PREPROCESS)
@pytest.mark.parametrize("i", range(len(cases.SIZES)))
def test_values_are_transformers(name: str, i: int, tmp_path: pathlib.Path) -> None:
    preprocess = read(tmp_path, cases.PREPROCESS[name])
    values = preprocess(picture(Image.fromarray(cases.pixels(*cases.SIZES[i]))))
    expected = GOLDEN[f"{name}/{i}"]
    assert (values.dtype, values.shape) == (np.float32, expected.shape)
    assert preprocess.output == expected.shape[1:]
    np.testing.assert_allclose(values, expected, atol=1e-6)


def test_the_output_may_depend_on_the_image(tmp_path: pathlib.Path) -> None:
    preprocess = read(tmp_path, {"size": {"shortest_edge": 10}, "do_center_crop": False})
    assert preprocess.output is None
    assert preprocess(picture(Image.new("RGB", (40, 20)))).shape == (3, 10, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"size": {"longest_edge": 30}},
        {"size": 30, "crop_size": 0},
        {"size": "large"},
        {"size": 30, "image_mean": [0.5]},
        {"size": 30, "image_std": None},
        {"size": 30, "do_pad": True},
        {"size": 1 << 20},
        {"size": 30, "resample": "lanczos"},
        {"size": 30, "resample": 6},
        {"size": float("inf")},
        {"size": 10**400},
        {"size": []},
        {"size": 30, "image_std": [0, 1, 1]},
        {"size": 30, "image_mean": [float("nan")] * 3},
        {"size": 30, "rescale_factor": 10**400},
        {"image_processor": []},
    ],
    ids=str,
)
def test_other_configs_are_refused(settings: dict[str, Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config.json: is not what .*; copy the model's own"):
        read(tmp_path, settings)


def test_a_strip_would_become_too_long(tmp_path: pathlib.Path) -> None:
    preprocess = read(tmp_path, {"size": {"shortest_edge": 336}, "crop_size": 336})
    with pytest.raises(
        ImageError, match=r"the image: has 30000 x 1 pixels, .* would see 10080000 x 336; accepted: up to"
    ):
        preprocess(picture(Image.new("RGB", (30_000, 1))))
    whole = read(tmp_path, {"do_resize": False, "do_center_crop": False})
    with pytest.raises(ImageError, match="would see 5000 x 5000"):
        whole(picture(Image.new("RGB", (5000, 5000))))
