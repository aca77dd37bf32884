"""A picture from the engines of a diffusers pipeline.

    build-engine FLUX.1-dev/ -o flux --target rtx-blackwell --set image-size=1024x1024 --calib-data prompts.txt
    python examples/diffusion.py FLUX.1-dev/ flux "a cat on a red chair" -o cat.png

A script of your own changes by the line that calls `load`.
"""

import argparse
from pathlib import Path

import torch

import trt_nvfp4.diffusers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path, help="the pipeline's directory")
    parser.add_argument("folder", type=Path, help="what build-engine wrote")
    parser.add_argument("prompt")
    parser.add_argument("-o", "--output", type=Path, default=Path("picture.png"))
    parser.add_argument("--size", default="1024x1024", help="HEIGHTxWIDTH, as the engines are built for")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-sequence-length", type=int, help="tokens of the prompt, where not the pipeline's default"
    )
    parser.add_argument("--runner", choices=("auto", "tensorrt", "onnxruntime"), default="auto")
    options = parser.parse_args()
    height, width = map(int, options.size.split("x"))
    further = {} if options.max_sequence_length is None else {"max_sequence_length": options.max_sequence_length}

    pipeline = trt_nvfp4.diffusers.load(options.pipeline, options.folder, runner=options.runner)
    picture = pipeline(
        options.prompt,
        height=height,
        width=width,
        num_inference_steps=options.steps,
        generator=torch.Generator().manual_seed(options.seed),
        **further,
    ).images[0]
    picture.save(options.output)
    print(options.output)


if __name__ == "__main__":
    main()
