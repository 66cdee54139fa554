"""Writes tests/golden/vision.npz: what transformers makes of the model and the images of tests/vision_cases.py.

usage: python tools/golden/vision.py      (needs torch and transformers: pip install '.[torch,vision]')
"""

import pathlib
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import vision_cases as cases  # noqa: E402


def pixel_values(settings: dict, size: tuple[int, int]) -> np.ndarray:
    """Returns one image as (3, height, width) float32."""
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = Image.fromarray(cases.pixels(*size))
    return np.asarray(CLIPImageProcessorPil(**settings)(image, return_tensors="np")["pixel_values"][0])


def logits(folder: pathlib.Path, images: list[np.ndarray]) -> np.ndarray:
    """Returns the logits (n, vocab) float32 of the prompt with its images, whose encoder is one convolution."""
    import torch
    from transformers import LlavaForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    class Tower(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor, **_: object) -> BaseModelOutputWithPooling:
            weight, bias = map(torch.from_numpy, cases.patches())
            maps = torch.nn.functional.conv2d(pixel_values, weight, bias, stride=cases.PATCH)
            features = maps.flatten(2).transpose(1, 2)
            return BaseModelOutputWithPooling(last_hidden_state=features, hidden_states=(features,))

    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.model.vision_tower = Tower()
    ids = []
    for token in cases.PROMPT:
        ids += [token] * (cases.N_TOKENS if token == cases.IMAGE_TOKEN else 1)
    with torch.no_grad():
        result = model.eval()(input_ids=torch.tensor([ids]), pixel_values=torch.from_numpy(np.stack(images)))
    return np.asarray(result.logits[0].float().numpy())


def main() -> None:
    golden = {
        f"{name}/{i}": pixel_values(settings, size)
        for name, settings in cases.PREPROCESS.items()
        for i, size in enumerate(cases.SIZES)
    }
    with tempfile.TemporaryDirectory() as folder:
        place = cases.write_model(pathlib.Path(folder))
        golden["logits"] = logits(place, [golden[f"llava-1.5/{i}"] for i in range(2)])
    out = ROOT / "tests" / "golden" / "vision.npz"
    np.savez_compressed(out, **golden)
    print(f"wrote {out.relative_to(ROOT)}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
