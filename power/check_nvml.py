"""NVML's energy counter against integrated power, over a decode on the GPU.

    python power/check_nvml.py --seconds 20 --json OUT

Decodes with a Llama-2-7B of random weights in transformers (the energy does not depend on the text), and prints
the joules of the GPU's own counter beside those that the trapezoid rule makes of its power samples. Needs torch,
transformers, nvidia-ml-py and 20 GB of GPU memory; --layers N for less.
"""

import argparse
import dataclasses
import json
import sys
import time

from edgekv.errors import EdgeKVError
from edgekv.files import atomic_write
from edgekv.power import EnergyMeter, PowerSampler, find_meter

PROMPT, VOCAB = 512, 32000


def decode(meter: EnergyMeter, layers: int, seconds: float) -> str:
    """Meters a prefill, and a decode of so many seconds; returns the GPU's name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, vocab_size=VOCAB, max_position_embeddings=8192)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"), torch.inference_mode():
        model = LlamaForCausalLM(config).eval()
        tokens = torch.randint(VOCAB, (1, PROMPT))
        model(tokens)  # warm-up
        torch.cuda.synchronize()
        with meter:
            with meter.phase("prefill") as prefill:
                begun = time.perf_counter()
                while time.perf_counter() - begun < 2.0:
                    out = model(tokens, use_cache=True)
                    torch.cuda.synchronize()
                    prefill.tokens += PROMPT
            with meter.phase("decode") as phase:
                begun = time.perf_counter()
                while time.perf_counter() - begun < seconds:
                    token = out.logits[:, -1:].argmax(-1)
                    out = model(token, past_key_values=out.past_key_values, use_cache=True)
                    torch.cuda.synchronize()
                    phase.tokens += 1
    return torch.cuda.get_device_name()


def main() -> int:
    parser = argparse.ArgumentParser(description="NVML's energy counter against integrated power.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of decoding (default %(default)g)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the report")
    args = parser.parse_args()
    try:
        sensor, notes = find_meter("nvml")
        meter = EnergyMeter(PowerSampler(sensor, notes=notes))
        gpu = decode(meter, args.layers, args.seconds)
        report = meter.report()
        print("\n".join(f"{topic:<12}{text}" for topic, text in [("gpu", gpu), *report.rows()]))
        if args.json:
            facts = {"gpu": gpu, "layers": args.layers, "energy": dataclasses.asdict(report)}
            atomic_write(args.json, (json.dumps(facts, indent=1) + "\n").encode())
    except EdgeKVError as error:
        print(f"check_nvml.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
