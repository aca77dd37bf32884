"""EAGLE-3 heads: one Llama layer over a token's embedding and the target's hidden states of three layers, with a
vocabulary of its own; as SpecForge, vLLM and SGLang publish them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from trt_nvfp4.builder.errors import ModelFaultError, first_line
from trt_nvfp4.builder.export.checkpoints.directory import held_tensors
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates, assign
from trt_nvfp4.common.model_config import check_counts, read_config

#: Layers of the target that a head reads.
LAYERS = 3
# Names in published files, and in the module.
_NAMES = (
    (r"(model\.)?(midlayer|layers\.0)\.", "model.model.layers.0."),
    (r"(model\.)?(?=(norm|embed_tokens)\.)", "model.model."),
    (r"(?=lm_head\.)", "model."),
    (r"(model\.)?(?=fc)", "fuse."),
)


class EagleLayer(LlamaDecoderLayer):
    """Takes a token's embedding and a hidden state side by side, and gives a hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        width, bias = config.hidden_size, config.attention_bias
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, torch.nn.Linear(2 * width, narrow.out_features, bias=bias))
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(self, hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        embeds, residual = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(residual)
        if self.norm_before_residual:
            residual = normed
        both = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = residual + self.self_attn(hidden_states=both, **kwargs)[0]
        found: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return found


class DraftVocabulary(torch.nn.Linear):
    """Logits of the target's vocabulary, of which the head knows a part: token t of its own is the target's token
    `targets[t]`. All others have the least finite value."""

    def __init__(self, width: int, size: int, vocabulary: int) -> None:
        super().__init__(width, size, bias=False)
        self.vocabulary = vocabulary
        self.take_targets(torch.arange(size, device="cpu"))

    def take_targets(self, targets: torch.Tensor) -> None:
        """`targets`: int64 [size]."""
        places = torch.full((self.vocabulary,), len(targets), device="cpu")
        places[targets.cpu()] = torch.arange(len(targets), device="cpu")
        self.register_buffer("places", places, persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        least = torch.full_like(logits[..., :1], torch.finfo(logits.dtype).min)
        return torch.cat((logits, least), -1).index_select(-1, self.get_buffer("places"))


class Fuse(torch.nn.Module):
    """Makes one hidden state of those of three of the target's layers, side by side; in the target's own graph."""

    def __init__(self, config: LlamaConfig, target_width: int) -> None:
        super().__init__()
        norms = (LlamaRMSNorm(target_width, eps=config.rms_norm_eps) for _ in range(LAYERS))
        self.fc_norm = torch.nn.ModuleList(norms if getattr(config, "fc_norm", False) else ())
        self.fc = torch.nn.Linear(LAYERS * target_width, config.hidden_size, bias=False)

    def forward(self, side_by_side: torch.Tensor) -> torch.Tensor:
        if len(self.fc_norm):
            chunks = side_by_side.chunk(LAYERS, -1)
            side_by_side = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        found: torch.Tensor = self.fc(side_by_side)
        return found


class EagleHead(Head):
    """`fuse` belongs to the target's graph; the rest is the head's."""

    def __init__(self, config: LlamaConfig, target_width: int) -> None:
        """`config`: a published one; `vocab_size` is the target's. `target_width`: of the target's hidden states."""
        super().__init__(LlamaForCausalLM(config))
        size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.model.model.layers[0] = EagleLayer(config)
        self.model.lm_head = DraftVocabulary(config.hidden_size, size, config.vocab_size)
        self.fuse = Fuse(config, target_width)

    def joined(self, embeds: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return torch.cat((embeds, previous), -1)

    def hidden_states(self) -> HiddenStates:
        """Before its final norm."""
        return HiddenStates([self.model.model.norm], self.model.config.hidden_size)


def states_for_eagle(target: Any, head: EagleHead) -> HiddenStates:
    """The target's hidden states that an EAGLE-3 head reads. Raises ModelFaultError where the target lacks the layers
    that the head's configuration names."""
    text = target.config.get_text_config(decoder=True)
    decoder = target.get_decoder()
    count = text.num_hidden_layers
    lists = (part for part in decoder.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == count)
    parts = [*next(lists), decoder.norm]
    numbers = _entered_layers(head.config, count)
    if not all(0 <= number < len(parts) for number in numbers) or len(set(numbers)) != len(numbers):
        raise ModelFaultError(
            f"--draft {head.config.name_or_path}: it reads the hidden states before the layers "
            f"{', '.join(map(str, numbers))} of a target, which has {count}; give the head of this model"
        )
    return HiddenStates([parts[number] for number in numbers], head.config.hidden_size, head.fuse)


def _entered_layers(config: Any, count: int) -> Sequence[int]:
    """Layers whose inputs a head reads. SpecForge and SGLang name the layers before them, in `eagle_config`; vLLM's
    entry names them themselves. The default is that of all three."""
    entry, inner = "eagle_aux_hidden_state_layer_ids", getattr(config, "eagle_config", None)
    behind = inner.get(entry) if isinstance(inner, dict) else None
    stated = behind or getattr(config, entry, None) or [2, count // 2, count - 3]
    if not isinstance(stated, list) or [type(number) for number in stated] != [int] * LAYERS:
        raise ModelFaultError(f"--draft {config.name_or_path}: its {entry} must be three numbers of layers; correct it")
    return [number + 1 for number in stated] if behind else stated


def load_eagle(directory: Path, target: Any) -> EagleHead:
    """The head in `directory`, in the type of `target`, a transformers model. Raises ModelFaultError for one that does
    not fit."""
    text = target.config.get_text_config(decoder=True)
    stated = read_config(directory)
    for name, expected in (("target_hidden_size", text.hidden_size), ("vocab_size", text.vocab_size)):
        found = stated.get(name, stated.get("hidden_size") if name == "target_hidden_size" else expected)
        if found != expected:
            what = "hidden states of width" if name == "target_hidden_size" else "a vocabulary of"
            raise ModelFaultError(
                f"--draft {directory}: it was trained for {what} {found}, and the model has {expected}; give the head "
                "of this model"
            )
    try:
        check_counts(stated)
        config = LlamaConfig(**{**stated, "num_hidden_layers": 1, "tie_word_embeddings": False})
        config.name_or_path = str(directory)
        with torch.device("meta"):
            head = EagleHead(config, text.hidden_size)
        head.model.model.rotary_emb = LlamaRotaryEmbedding(config)
    except Exception as error:  # whatever transformers raises of values that no Llama has
        raise ModelFaultError(f"{_wrong(directory)}: {first_line(error)}") from error
    tensors = _tensors(directory)
    mapping, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    embedding = target.get_input_embeddings().weight
    state = {name: torch.nn.Parameter(tensor.to(embedding.dtype), False) for name, tensor in tensors.items()}
    state.setdefault("model.model.embed_tokens.weight", embedding)
    assign(_wrong(directory), head, state)
    if mapping is not None:
        head.model.lm_head.take_targets(_targets(directory, mapping, head.model.lm_head))
    return head.eval()


def _targets(directory: Path, mapping: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
    """[draft vocabulary]: the target's token for each token of the head; `mapping` (d2t) has the differences. Raises
    ModelFaultError for another shape, for fractions, and for tokens that the target does not have."""
    own = torch.arange(vocabulary.out_features)
    if mapping.shape == own.shape and not mapping.dtype.is_floating_point:
        targets = own + mapping
        if targets.min() >= 0 and targets.max() < vocabulary.vocabulary:
            return targets
    raise ModelFaultError(
        f"--draft {directory}: d2t is {mapping.dtype} {list(mapping.shape)}; it must map {len(own)} tokens to the "
        f"model's {vocabulary.vocabulary}: download the head again"
    )


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors in a head's files, quantized ones dequantized, by their names in the module."""
    held = held_tensors(directory)
    if held is None:
        raise ModelFaultError(f"--draft {directory}: it has no safetensors files; convert its weights to safetensors")
    found = {}
    for name, read in held.state_dict().items():
        for pattern, own in _NAMES:
            name, changed = re.subn(rf"^{pattern}", own, name)
            if changed:
                break
        found[name] = read[...]
    return found


def _wrong(directory: Path) -> str:
    return f"--draft {directory}: not an EAGLE-3 head as its config.json says"
