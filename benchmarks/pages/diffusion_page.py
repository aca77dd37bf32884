"""Writes docs/figures/diffusion.md: the recorded sweep of diffusers pipelines, predictions, and times on an H200."""

from collections.abc import Iterator

from benchmarks.pages.records import DOCS, link, load, script
from benchmarks.pages.vla_page import table
from trt_nvfp4.builder.roofline.predict import LIMITS, subgraph_cost
from trt_nvfp4.graph_passes.lowerings.decision import Decision

PAGE = DOCS / "figures" / "diffusion.md"
NAME, TIMES, TRAINED = "diffusion", "diffusion_linears", "trained_denoiser"
DECISIONS = {"W4A4": Decision.NVFP4_W4A4, "FP8": Decision.FP8, "BF16": Decision.BF16}
TARGETS = ("rtx-blackwell", "spark")
#: Number of products of a step, kind, inputs, outputs or hidden values, and tokens.
Products = list[tuple[int, str, int, int, int]]
_PICTURE, _TEXT, _VIDEO = 64 * 64, 512, 21 * 30 * 52
_OF_BOTH = ((_PICTURE, 19), (_TEXT, 19))
#: By the published configurations; modulation is one row, and left out.
MODELS: dict[str, Products] = {
    "FLUX.1, 1024x1024, 512 tokens of text": [
        *((4 * layers, "linear", 3072, 3072, tokens) for tokens, layers in _OF_BOTH),
        *((layers, "mlp", 3072, 12288, tokens) for tokens, layers in _OF_BOTH),
        (3 * 38, "linear", 3072, 3072, _PICTURE + _TEXT),
        (38, "linear", 3072, 12288, _PICTURE + _TEXT),
        (38, "linear", 15360, 3072, _PICTURE + _TEXT),
    ],
    "Wan 2.x 14B, 832x480, 81 frames": [
        (40 * 6, "linear", 5120, 5120, _VIDEO),
        (40 * 2, "linear", 5120, 5120, _TEXT),
        (40, "mlp", 5120, 13824, _VIDEO),
    ],
}


def page() -> str:
    return f"{pipelines()}\n\n{trained()}\n\n{predictions()}\n\n{times()}\n"


def pipelines() -> str:
    record = load(NAME)
    rows = []
    for name, found in record["families"].items():
        plan, parts = found["nvfp4"]["block_weights"], found["nvfp4"]["parts"]
        shares = (f"{plan.get(decision, 0):.1%}" for decision in ("nvfp4_w4a4", "nvfp4_w4a16", "keep"))
        pictures = (f"{found[how]['cosine']:.4f}, {found[how]['psnr_db']:.1f} dB" for how in ("bf16", "nvfp4"))
        rows.append((f"`{name}`", f"{sum(parts.values())} of {len(parts)}", *shares, *pictures))
    heads = ("family", "engines verified", "W4A4", "W4A16", "kept", "picture in BF16", "picture in NVFP4")
    versions = ", ".join(f"{key} {value}" for key, value in record["environment"].items() if key != "command")
    return f"""# Diffusion pipelines

Small pipelines of diffusers with random weights, built for RTX Blackwell on a machine without a GPU: every part an
engine whose planned layers were found in it. *W4A4*, *W4A16*, *kept*: shares of the weights of the denoiser's blocks
(linears and MLPs) in the plan with calibration on two prompts. *picture*: cosine and PSNR against diffusers in float32,
of a prompt and seed that the build had not seen, three steps, the rewritten parts in ONNX Runtime. The random weights
are enlarged, so that errors grow more than in a trained model.

{table(heads, rows)}

{versions}. Written by `python -m benchmarks.pages.diffusion_page` from {link(NAME)}, the record of
`{record["environment"]["command"]}`."""


def trained() -> str:
    record = load(TRAINED)
    rows = [(name, f"{found['cosine']:.4f}", f"{found['psnr_db']:.1f} dB") for name, found in record["found"].items()]
    autoencoder, denoiser = record["training_steps"]
    return f"""## A trained denoiser

A FLUX of two double and two single blocks of width 128, trained on coloured shapes of 32x32 pixels for {denoiser}
steps of 24 pictures, its autoencoder for {autoencoder}. {record["pictures"]} prompts, {record["denoising_steps"]}
denoising steps each, the same noise in every row; ONNX Runtime runs the rewritten parts. In NVFP4, calibrated on other
prompts, shapes and colours stay, but a small shape may go: a width of 128 is less than any published model's.

![Pictures by diffusers, in BF16 and in NVFP4](trained_denoiser.png)

{table(("parts", "cosine", "PSNR against diffusers"), rows)}

`{record["environment"]["command"]}`, recorded in {link(TRAINED)}."""


def predictions() -> str:
    rows = []
    for name, products in MODELS.items():
        for target in TARGETS:
            seconds = [sum(_seconds(products, target, decision)) for decision in DECISIONS.values()]
            ratios = (f"{each / seconds[0]:.1f}" for each in seconds[1:])
            rows.append((name, f"`{target}`", *(f"{1e3 * each:.1f} ms" for each in seconds), *ratios))
    heads = ("linears and MLPs of a step", "target", *DECISIONS, "FP8 / W4A4", "BF16 / W4A4")
    return f"""## Predictions

**Predictions, not measurements**: the least time by the GPU's published peaks that the linears and MLPs of the blocks
take in one denoising step ([roofline](roofline.md)). Attention's own products and norms are not in it; no kernel
reaches the peaks.

{table(heads, rows)}"""


def _seconds(products: Products, target: str, decision: Decision) -> Iterator[float]:
    for count, kind, inputs, others, tokens in products:
        shapes = {"in_features": inputs, "out_features": others}
        if kind != "linear":
            shapes = {"in_features": inputs, "intermediate_features": others, "out_features": inputs}
        yield count * subgraph_cost(kind, shapes, decision, tokens, LIMITS[target]).seconds


def times() -> str:
    record = load(TIMES)
    rows = []
    for found in record["shapes"]:
        took = {name: timing["median_us"] for name, timing in found["timings"].items()}
        ours = (f"{took[name]:.0f} us" if name in took else "-" for name in ("nvfp4 w4a16", "fp8 plugin"))
        torchs = (f"{took[name]:.0f} us" for name in ("fp8", "bf16"))
        rows.append((found["name"], f"{found['k']}, {found['n']}", *ours, *torchs))
    heads = ("part of a block", "inputs, outputs or hidden values", "W4A16", "our FP8", "torch FP8", "torch BF16")
    return f"""## Times on an H200

Medians at {record["shapes"][0]["m"]} tokens, a picture of 1024x1024 with its text. This GPU has no FP4 tensor cores:
W4A4, which these shapes get on Blackwell, is not in it, and has no times yet. W4A16 reads a quarter of the bytes, but
multiplies in BF16 and decodes weights again for every tile of tokens: where thousands of tokens are multiplied it is
the slowest, and [FP8 is planned on Hopper](../how_to/plans.md#w4a16-or-fp8). Our FP8 is the plugin of gated MLPs; other
products get TensorRT's.

{table(heads, rows)}

{record["environment"]["gpu"]}, torch {record["environment"]["torch"]}; `{script(TIMES)}`, recorded in {link(TIMES)}."""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
