"""A small FLUX that is trained on the spot, minutes on two cores: its pictures from diffusers and from engines' parts.

    python -m tests.builder.components.diffusion.trained [--out RECORD.json] [--pictures PICTURES.png] [--keep DIR]

Pictures of coloured shapes, which prompts name. The autoencoder and the denoiser are trained; text encoders keep random
weights, whose states tell prompts apart. The pipeline is then built for RTX Blackwell in BF16 and, calibrated on
prompts, in NVFP4, and ONNX Runtime runs the rewritten parts. Not a test: training takes minutes.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional

import trt_nvfp4.diffusers
from benchmarks.harness import HERE, record
from tests.builder.components.diffusion.pipeline_sweep import versions
from tests.builder.components.diffusion.pipelines import WIDTH, _autoencoder, _clip, _flow, _t5, _tokenizer
from trt_nvfp4.builder.pipeline import parts_build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.metrics import cosine, psnr

SIZE, TEXT, STEPS, SEED = 32, 32, 12, 3
COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1), "yellow": (1, 1, -1), "white": (1, 1, 1)}
SHAPES = ("circle", "square", "triangle")
PROMPTS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
SHOWN = PROMPTS[::2]
DOCS = HERE.parent / "docs" / "figures"


def drawn(prompts: list[str], rng: np.random.Generator) -> torch.Tensor:
    """Pictures [count, 3, SIZE, SIZE] in -1 to 1, of a shape each, anywhere and of any size, with smooth edges."""
    down, right = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    pictures = []
    for prompt in prompts:
        _, colour, shape = prompt.split()
        radius = rng.uniform(6, 10)
        y, x = (axis - rng.uniform(radius + 1, SIZE - radius - 2) for axis in (down, right))
        outside = {
            "circle": np.hypot(x, y) - radius,
            "square": np.maximum(abs(x), abs(y)) - 0.85 * radius,
            "triangle": np.maximum(y - 0.7 * radius, 0.87 * abs(x) - 0.5 * y - 0.6 * radius),
        }[shape]
        inside = np.clip(0.5 - outside, 0, 1)
        pictures.append([inside * (level + 1) - 1 for level in COLOURS[colour]])
    return torch.tensor(np.array(pictures, np.float32))


def batches(steps: int, size: int, rng: np.random.Generator) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Numbers of prompts, and their pictures."""
    for _ in range(steps):
        numbers = rng.integers(0, len(PROMPTS), size).tolist()
        yield numbers, drawn([PROMPTS[number] for number in numbers], rng)


def optimizer(model: torch.nn.Module, rate: float, steps: int) -> tuple[Any, Any]:
    made = torch.optim.AdamW(model.parameters(), rate)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, rate, total_steps=steps)


def train(steps: tuple[int, int], seed: int = 0) -> Any:
    """The pipeline after so many steps of its autoencoder and of its denoiser."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    autoencoder = _autoencoder(4, use_quant_conv=False, use_post_quant_conv=False)
    adam, schedule = optimizer(autoencoder, 4e-3, steps[0])
    for number, (_, pictures) in enumerate(batches(steps[0], 16, rng)):
        latents = autoencoder.encode(pictures).latent_dist.mean
        loss = functional.mse_loss(autoencoder.decode(latents).sample, pictures) + 1e-4 * latents.square().mean()
        step(loss, autoencoder, adam, schedule)
        if number % 100 == 99:
            print(f"autoencoder {number + 1}: {loss.item():.4f}", flush=True)
    with torch.no_grad():
        sample = autoencoder.encode(drawn(PROMPTS * 4, rng)).latent_dist.mean
    shift, scale = sample.mean().item(), 1 / sample.std().item()
    autoencoder.register_to_config(shift_factor=shift, scaling_factor=scale)
    denoiser = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, num_attention_heads=4, attention_head_dim=32,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(_flow(), autoencoder, _clip(), _tokenizer(77), _t5(), _tokenizer(128), denoiser)
    with torch.no_grad():
        texts, pooled, text_ids = pipeline.encode_prompt(PROMPTS, PROMPTS, max_sequence_length=TEXT)
    side = SIZE // 4  # of a picture of packed latents
    places = pipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    adam, schedule = optimizer(denoiser, 2e-3, steps[1])
    for number, (numbers, pictures) in enumerate(batches(steps[1], 24, rng)):
        with torch.no_grad():
            latents = (autoencoder.encode(pictures).latent_dist.mean - shift) * scale
        latents = pipeline._pack_latents(latents, len(numbers), 4, 2 * side, 2 * side)
        noise, time = torch.randn_like(latents), torch.rand(len(numbers))
        mixed = latents + (noise - latents) * time[:, None, None]
        found = denoiser(mixed, texts[numbers], pooled[numbers], time, places, text_ids).sample
        loss = functional.mse_loss(found, noise - latents)
        step(loss, denoiser, adam, schedule)
        if number % 200 == 199:
            print(f"denoiser {number + 1}: {loss.item():.4f}", flush=True)
    return pipeline


def step(loss: torch.Tensor, model: torch.nn.Module, adam: Any, schedule: Any) -> None:
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    schedule.step()


def pictures(pipeline: Any, prompts: list[str]) -> np.ndarray:
    """[count, SIZE, SIZE, 3] in 0 to 1, the same noise for every pipeline."""
    pipeline.set_progress_bar_config(disable=True)
    made = [
        pipeline(
            prompt=prompt, height=SIZE, width=SIZE, num_inference_steps=STEPS, max_sequence_length=TEXT,
            generator=torch.Generator().manual_seed(SEED + number), output_type="np",
        )[0][0]
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    return np.stack(made)


def built(folder: Path, model: Path, **options: Any) -> Any:
    """The pipeline with the rewritten parts in ONNX Runtime."""
    target, size = find_target("rtx-blackwell"), f"{SIZE}x{SIZE}"
    request = Request(
        model, target, image_size=size, pipeline_arguments=f"max_sequence_length={TEXT}", accuracy_samples=0, **options
    )
    parts_build.run(request)
    return trt_nvfp4.diffusers.load(model, request.base, runner="onnxruntime")


def show(rows: dict[str, np.ndarray], file: Path) -> None:
    """A row of pictures for each name."""
    figure, places = plt.subplots(len(rows), len(SHOWN), figsize=(1.1 * len(SHOWN), 1.25 * len(rows)))
    for line, (name, row) in zip(places, rows.items(), strict=True):
        for place, picture in zip(line, row, strict=True):
            place.imshow(picture)
            place.set_xticks([])
            place.set_yticks([])
        line[0].set_ylabel(name, fontsize=8)
    for place, prompt in zip(places[0], SHOWN, strict=True):
        place.set_title(prompt.removeprefix("a "), fontsize=7)
    figure.tight_layout(pad=0.4)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=(400, 2500), help="of the autoencoder and the denoiser")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "trained_denoiser.json")
    parser.add_argument("--pictures", type=Path, default=DOCS / "trained_denoiser.png")
    parser.add_argument("--keep", type=Path, help="write the pipeline here; one that is here is not trained again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = given.keep or folder / "model"
        if not (model / "model_index.json").is_file():
            train(tuple(given.steps)).save_pretrained(model)
        (folder / "prompts.txt").write_text("\n".join(PROMPTS[1::2]) + "\n")
        rows = {"diffusers": pictures(diffusers.FluxPipeline.from_pretrained(model), SHOWN)}
        bf16 = built(folder, model, bundle=folder / "bf16", precision="bf16")
        rows["BF16"] = pictures(bf16, SHOWN)
        nvfp4 = built(folder, model, output=folder / "nvfp4", calib_data=folder / "prompts.txt")
        rows["NVFP4"] = pictures(nvfp4, SHOWN)
    found = {
        name: {
            "cosine": round(cosine(row, rows["diffusers"]), 5),
            "psnr_db": round(psnr(found=row, expected=rows["diffusers"]), 2),
        }
        for name, row in rows.items()
        if name != "diffusers"
    }
    print(found)
    show(rows, given.pictures)
    command = "python -m tests.builder.components.diffusion.trained"
    shape = {"training_steps": given.steps, "denoising_steps": STEPS, "pictures": len(SHOWN)}
    record(given.out, {"environment": {"command": command, **versions()}, **shape, "found": found})


if __name__ == "__main__":
    main()
