"""Writes docs/figures/performance.md: every table comes from a recorded run in benchmarks/results."""

import argparse
from collections.abc import Iterable
from typing import Any

from benchmarks.pages.records import DOCS, link, load, script

PAGE = DOCS / "figures" / "performance.md"

INTRODUCTION = """# Performance

Every figure on this page comes from a recorded run. The JSON file named above a table holds the GPU, the driver, the
versions and the command. A ratio is the time of a baseline in the same run divided by ours: 2x is twice as fast. "Of
bandwidth" is the time that reading the necessary bytes once would take, at the read bandwidth measured in the same run,
divided by our time. The kernels for Blackwell have not run on such a GPU yet. They are checked on the PTX emulator;
[Roofline](roofline.md) predicts what a GPU can reach at best.

The benchmarks need a GPU, a CUDA build of torch and `pip install '.[benchmarks]'`.
[`benchmarks/notes`](../../benchmarks/notes/README.md) logs what was tried.
`python -m benchmarks.pages.performance_page` writes this page."""

STACK = """## A stack of MLPs in one launch

18 gated MLP layers (2048/16384, GELU-tanh) as one `NVFP4PersistentMLP` node, BF16 activations (W4A16), weights out of
L2. Each CUDA graph holds four calls, which spreads its launch cost. BF16 and FP8 are `F.linear` and `torch._scaled_mm`
under torch.compile and a CUDA graph, the faster of its default and its autotuning."""

LINEAR = """## Linears

`NVFP4Linear` (W4A16, FP16 activations) in the same runs, against `F.linear` in BF16, torch's int4 and humming."""

MOE = """## Mixtures of experts

`NVFP4MoE` (W4A16), from the router's logits to the weighted sum, against BF16's grouped_mm under torch.compile, and
against humming's two GEMMs of the experts alone on the same weights, the faster of its two ways."""

FP8_MLP = """## FP8 MLPs

`FP8GatedMLP` on the same stack, layer by layer, calibrated scales, against `torch._scaled_mm` under torch.compile. The
floor is the larger of weights over read bandwidth and products over the peak, which is that of `torch._scaled_mm` on
8192x8192x8192 in the same run."""

FP8_MOE = """## FP8 mixtures of experts

`FP8MoE` with calibrated scales, from the router's logits to the weighted sum, against BF16's grouped_mm under
torch.compile, and against torch's FP8 GEMMs of the experts alone, on rows that are sorted and quantized already: expert
by expert (`_scaled_mm`) and in one launch (`_scaled_grouped_mm`)."""

GENERATE = """## Text without TensorRT

`generate --runner torch`: a language model of eight layers of Qwen3-0.6B's shape, random weights, prompts of 512
tokens. Our plugins with torch for the rest, the same graph unquantized in BF16, and transformers' own `generate` with a
static cache, which compiles its decode steps. Tokens are chosen on the GPU.

Behind the first token, where steps are CUDA graphs, the plugins are 2.6 and 2.2 times as fast as transformers. The
first token comes later than transformers': a prompt's operators are launched one by one and wait for the CPU, which
other programs used as well."""

ATTENTION = """## Attention over a cache

`CachedAttention` at the shape of Qwen3-8B (32 query heads, 8 of keys and values, 128 wide), one new token a sequence,
against torch's scaled_dot_product_attention in FP16. About 9 us of a call do not depend on the length."""

PREFILL = "Prefill into an empty FP16 cache, against torch's flash attention and cuDNN's."

LINEAR_ATTENTION = """## Linear attention

`LinearAttention` in bfloat16 with float32 states in place, against flash-linear-attention 0.6 (Triton) in the same run:
gated delta with 32 heads of 128, and the gated rule with 64 heads of 64 over states of 128, as Mamba2 has them. The
share of bandwidth counts the state read and written once, and inputs and outputs. No state is in L2. Errors are
of the output, against float64. The barriers of the kernel for long prompts changed twice after this run: behind
the first change a shorter run found the same times within 1%, behind the second none was made."""

DECODER = """## A whole decode step

All layers and the head of published shapes, random weights, one new token a sequence: our plugins one after the other
in a CUDA graph (parts), and all layers in one launch (`NVFP4Decoder`; AUTO takes it for one token alone). Behind each
time its fraction of the floor: NVFP4 weights and the caches, in their type, read once at the read bandwidth that the
record states. BF16 and FP8 are torch.compile's in a CUDA graph, as multiples of the faster of parts and one
launch with 16-bit caches. Mixtures have no baseline here. At one token neither memory nor products bind the launch for
all layers, but what follows one another in every layer: hand-overs between blocks, and attention. Parts pay a start
each. What was measured against both: [notes](../../benchmarks/notes/README.md)."""

HYBRIDS = """## A whole decode step of hybrids

The same of hybrid language models: our plugins one after the other in a CUDA graph, and compiled torch for what lies
between. The floor holds NVFP4 weights (of the routed experts those that tokens choose on average), routers and gates in
16 bits, caches, and states once each way in float32. Tokens are new ones of each sequence."""

HYBRID_PARTS = "Microseconds of each part's calls alone; norms with the routers or gates that follow them."

HYBRID_LAYERS = """The recurrent layers alone, one token, against the same in BF16 under torch.compile. The error is the
first layer's against BF16."""

QUANTIZE = """## Quantizers of 4-bit activations

`NVFP4Quantize` behind a norm and a residual, FP16: block scales by amax, the better of two (four over six) and the best
of several (sweep), without and with 64 residual channels, times as multiples of amax. The tensor scale is given, as
with calibration."""


VLA = """## A robot policy's MLPs

One observation of a pi0.5-shaped policy: the gated MLPs of its prefix (18 layers 2048/16384, 968 tokens) and of ten
steps of its action expert (18 layers 1024/4096, 50 tokens), layer by layer, all in one run. BF16 and FP8 are `F.linear`
and `torch._scaled_mm` under torch.compile and a CUDA graph, BF16 the faster of its default and its autotuning. From
some tokens on FP8 is faster than W4A16 on Hopper, which has no FP4 tensor cores: W4A16 decodes weights again for every
block of rows. build-engine plans it so: FP8 from 33 tokens on with calibration data, from 65 on without."""

PARALLEL = """## Split over two GPUs

`NVFP4GatedMLP` and `NVFP4MoE` (W4A16, FP16 activations): each rank's share of the rows and columns, and NCCL's sum, in
one CUDA graph, against the whole op on one GPU in the same run. Predicted: one GPU's time halved, and the sum measured
alone."""


def times(run: dict[str, Any]) -> dict[str, float]:
    return {name: timing["median_us"] for name, timing in run["timings"].items()}


def fastest(run: dict[str, Any], variant: str) -> float:
    """Median microseconds of the fastest of its ways."""
    return min(us for name, us in times(run).items() if name.startswith(variant))


def table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    titles = heads.split(", ")
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(*names: str) -> str:
    """Which runs: GPU, bandwidth, file and command."""
    found = []
    for name in names:
        record = load(name)
        gpu, bandwidth = record["environment"]["gpu"], record["read_bandwidth"] / 1e12
        found.append(f"{gpu} ({bandwidth:.2f} TB/s): {link(name)}, `{script(name)}`")
    return "; ".join(found) + "."


def stack_table(gpu: str = "") -> str:
    """The stack, a row for each number of tokens; README shows the H200's."""
    rows = []
    for run in load(f"decode{gpu}")["stack"]:
        ours = times(run)["nvfp4 persistent bf16"]
        others = ("bf16", "fp8", "humming", "nvfp4 layer by layer bf16")
        share = run["bandwidth_fractions"]["nvfp4 persistent bf16"]
        rows.append([str(run["m"]), f"{share:.0%}", *(f"{fastest(run, other) / ours:.2f}x" for other in others)])
    return table("tokens, of bandwidth, BF16, FP8, humming (W4A16), launches layer by layer", rows)


def linear_table(gpu: str = "") -> str:
    runs = sorted(load(f"decode{gpu}")["linear"], key=lambda run: (run["n"], run["k"], run["m"]))
    rows = []
    for run in runs:
        ours = times(run)["nvfp4 fp16"]
        share = run["bandwidth_fractions"]["nvfp4 fp16"]
        ratios = (f"{times(run)[other] / ours:.2f}x" for other in ("bf16", "int4", "humming"))
        rows.append([f"{run['n']}x{run['k']}", str(run["m"]), f"{share:.0%}", *ratios])
    return table("outputs x inputs, tokens, of bandwidth, BF16, int4, humming", rows)


def moe_table(name: str, plugin: str, heads: str, others: tuple[str, ...]) -> str:
    record = load(name)
    rows = []
    for run in record["moe"]:
        ours = times(run)[plugin]
        least = run["megabytes"] / record["read_bandwidth"] * 1e12
        ratios = (f"{fastest(run, other) / ours:.2f}x" for other in others)
        rows.append([run["model"], str(run["tokens"]), f"{ours:.0f} us", f"{least / ours:.0%}", *ratios])
    return table(f"model, tokens, time, of bandwidth, {heads}", rows)


def fp8_table() -> str:
    rows = []
    for run in load("fp8_mlp")["stack"]:
        ours = times(run)["fp8 plugin"]
        shares = (run["floor_us"] / ours, run["fraction_of_peak"])
        ratios = (times(run)[other] / ours for other in ("torch", "torch, fast accumulation"))
        rows.append([str(run["m"]), f"{ours:.0f} us", *(f"{s:.0%}" for s in shares), *(f"{r:.2f}x" for r in ratios)])
    return table("tokens, time, of the floor, of the peak, FP8, FP8 with fast accumulation", rows)


def attention_table() -> str:
    rows = []
    for run in load("attention")["decode"]:
        if run["shape"] == "Qwen3-8B":
            ours = times(run)["plugin"]
            against = f"{times(run)['torch'] / ours:.2f}x" if "torch" in run["timings"] else "-"
            shares = [f"{ours:.0f} us", f"{run['fraction_of_bandwidth']:.0%}", against]
            rows.append([str(run["batch"]), run["cache"], str(run["length"]), *shares])
    return table("batch, cache, cached tokens, time, of bandwidth, torch", rows)


def linear_attention_table() -> str:
    rows = []
    for run in (run for part in ("decode", "prefill") for run in load("linear_attention")[part]):
        ours, other = (times(run)[name] for name in ("plugin", "fla"))
        shares = [f"{run['fraction_of_bandwidth']:.0%}", f"{run['error']['output']:.1e}"]
        sizes = [run["rule"], str(run["batch"]), str(run["tokens"])]
        rows.append([*sizes, f"{ours:.1f} us", f"{other / ours:.2f}x", *shares])
    return table("rule, batch, tokens, time, fla, of bandwidth, error", rows)


def decoder_table() -> str:
    rows = []
    for run in load("decoder")["steps"]:
        found, shares = times(run), run["fraction_of_floor"]
        names = ("parts", "one launch", "parts, FP8 caches", "one launch, FP8 caches")
        ours = [f"{found[name]:.0f} us, {shares[name]:.0%}" if name in found else "-" for name in names]
        best = min(found[name] for name in names[:2] if name in found)
        ratios = (f"{found[other] / best:.2f}x" if other in found else "-" for other in ("BF16", "FP8"))
        rows.append([run["model"], str(run["batch"]), str(run["length"]), *ours, *ratios])
    heads = (
        "model, batch, cached tokens, parts, one launch, parts with FP8 caches, one launch with FP8 caches, BF16, FP8"
    )
    return table(heads, rows)


def hybrid_table() -> str:
    rows = []
    for run in load("hybrid_steps")["steps"]:
        ours = f"{times(run)['parts']:.0f} us", f"{run['floor_us']:.0f} us", f"{run['fraction_of_floor']:.0%}"
        rows.append([run["model"], *(str(run[size]) for size in ("batch", "tokens", "length")), *ours])
    return table("model, batch, tokens, cached tokens, time, floor, of the floor", rows)


def hybrid_parts_table() -> str:
    """One new token of each sequence."""
    runs = [run for run in load("hybrid_steps")["steps"] if run["tokens"] == 1]
    parts = list(dict.fromkeys(part.split(" and ")[0] for run in runs for part in run["breakdown_us"]))
    rows = []
    for run in runs:
        times_of = [
            sum(us for part, us in run["breakdown_us"].items() if part.split(" and ")[0] == title) for title in parts
        ]
        rows.append([run["model"], str(run["batch"]), str(run["length"]), *(f"{us:.0f}" for us in times_of)])
    return table(", ".join(["model, batch, cached tokens", *parts]), rows)


def hybrid_layers_table() -> str:
    rows = []
    for run in load("hybrid_steps")["recurrent_layers"]:
        ours = times(run)["plugins"]
        shares = f"{run['floor_us'] / ours:.0%}", f"{times(run)['BF16'] / ours:.2f}x", f"{run['difference']:.1e}"
        rows.append([run["model"], str(run["layers"]), str(run["batch"]), f"{ours:.0f} us", *shares])
    return table("model, layers, batch, time, of the floor, BF16, error", rows)


def prefill_table() -> str:
    rows = []
    for run in load("attention")["prefill"]:
        found = times(run)
        others = [name for name in found if name.startswith("torch")]
        if run["shape"] == "Qwen3-8B" and run["cache"] == "float16" and others:
            ratios = (f"{found[f'torch {name}_attention'] / found['plugin']:.2f}x" for name in ("flash", "cudnn"))
            rows.append([str(run["new"]), f"{found['plugin']:.0f} us", f"{run['tflops']:.0f}", *ratios])
    return table("new tokens, time, TFLOPS, flash, cuDNN", rows)


def vla_table() -> str:
    """A robot policy's MLPs; docs/how_to/vla.md shows it, too."""
    found = {run["part"]: run for run in load("vla")["parts"]}
    rows = []
    for part, run in found.items():
        rows.append([f"{part}, {run['tokens']} tokens, {run['steps']}x", *_vla_cells([run])])
    rows.append(["sum", *_vla_cells(list(found.values()))])
    return table("part, FP8 plugin, W4A16 plugin, BF16, FP8", rows)


def _vla_cells(runs: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of the runs together, by each variant; the FP8 plugin beside the others."""

    def total(*variants: str) -> float:
        return sum(min(times(run)[variant] for variant in variants) for run in runs)

    ours = total("fp8 plugin")
    others = total("bf16", "bf16 autotuned"), total("fp8", "fp8, fast accumulation")
    cells = [f"{ours / 1e3:.2f} ms", f"{total('nvfp4 w4a16') / 1e3:.2f} ms"]
    return [*cells, *(f"{us / 1e3:.2f} ms ({us / ours:.2f}x)" for us in others)]


def parallel_table() -> str:
    rows = []
    for run in load("parallel")["steps"]:
        found = times(run)
        both = found[f"{run['ranks']} GPUs"]
        shown = (found["one GPU"], found["a rank's plugin"], found["the sum"], both, run["predicted_us"])
        rows.append([run["problem"], str(run["tokens"]), *(f"{us:.0f} us" for us in shown), f"{run['speed_up']:.2f}x"])
    return table("op, tokens, one GPU, a rank's plugin, the sum, two GPUs, predicted, speed-up", rows)


def quantize_table() -> str:
    rows = []
    for case in load("quantize_searches")["cases"]:
        if case["scale_given"]:
            found = times(case)
            ratios = (f"{found[name] / found['0+0']:.2f}x" for name in ("1+0", "2+0", "0+64", "2+64"))
            rows.append([str(case["m"]), str(case["k"]), f"{found['0+0']:.1f} us", *ratios])
    return table("tokens, channels, amax, four over six, sweep, amax + 64, sweep + 64", rows)


def generate_table() -> str:
    rows = [
        [run["contestant"], str(run["batch"]), f"{run['first_token_ms']:.1f} ms", f"{run['tokens_per_s']:.0f}"]
        for run in load("generate")["runs"]
    ]
    return table("variant, batch, first token, tokens/s behind it", rows)


def page() -> str:
    """The page's text."""
    parts = [
        INTRODUCTION,
        STACK,
        source("decode"),
        stack_table(),
        "![Microseconds by tokens, with the bandwidth floor](../../benchmarks/results/kernels/decode.svg)",
        source("decode_h100"),
        stack_table("_h100"),
        LINEAR,
        f"H200, `decode.json`:\n\n{linear_table()}",
        f"H100, `decode_h100.json`:\n\n{linear_table('_h100')}",
        MOE,
        *(
            f"{source(name)}\n\n{moe_table(name, 'nvfp4', 'BF16, humming', ('bf16', 'humming'))}"
            for name in ("moe", "moe_h100")
        ),
        FP8_MLP,
        source("fp8_mlp"),
        fp8_table(),
        FP8_MOE,
        source("fp8_moe"),
        moe_table(
            "fp8_moe",
            "fp8 plugin",
            "BF16, FP8 expert by expert, FP8 grouped",
            ("bf16", "fp8 GEMMs, expert by expert", "fp8 GEMMs, grouped"),
        ),
        ATTENTION,
        source("attention"),
        attention_table(),
        PREFILL,
        prefill_table(),
        LINEAR_ATTENTION,
        source("linear_attention"),
        linear_attention_table(),
        DECODER,
        f"NVIDIA H200: {link('decoder')}, `{script('decoder')}`.",
        decoder_table(),
        HYBRIDS,
        source("hybrid_steps"),
        hybrid_table(),
        HYBRID_PARTS,
        hybrid_parts_table(),
        HYBRID_LAYERS,
        hybrid_layers_table(),
        QUANTIZE,
        source("quantize_searches"),
        quantize_table(),
        VLA,
        source("vla"),
        vla_table(),
        PARALLEL,
        f"2 NVIDIA H200 over NVLink: {link('parallel')}, `{script('parallel')}`.",
        parallel_table(),
        GENERATE,
        f"NVIDIA H200: {link('generate')}, `{script('generate')}`.",
        generate_table(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
