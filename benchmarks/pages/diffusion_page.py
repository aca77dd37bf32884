"""Writes docs/figures/diffusion.md from the record of tests/builder/components/diffusion/pipeline_sweep.py."""

from benchmarks.pages.records import DOCS, link, load
from benchmarks.pages.vla_page import table

PAGE = DOCS / "figures" / "diffusion.md"
NAME = "diffusion"


def page() -> str:
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
`{record["environment"]["command"]}`.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
