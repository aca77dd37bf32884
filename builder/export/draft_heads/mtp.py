"""Heads that come in a checkpoint, for multi-token prediction (MTP): a layer of the model's own kind over a token's
embedding and the target's last hidden state."""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.errors import ModelFaultError, UsageError, first_line
from trt_nvfp4.builder.export.checkpoints.directory import held_tensors
from trt_nvfp4.builder.export.deferred import read_small
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates, assign, last_hidden_states
from trt_nvfp4.builder.export.loading import class_of_text, prepare


@dataclass(frozen=True)
class Layout:
    """Names of a head's tensors in a checkpoint, regular expressions behind `prefix`; {n} is the number of the target's
    layers. Only the first of several heads is read, which drafts token after token."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    #: What stands before the names of a layer's weights.
    layer: str = ""
    #: The projection takes the hidden state before the embedding.
    hidden_first: bool = False


#: DeepSeek-V3 and GLM-4.5; Qwen3-Next and Qwen3.5; MiMo; Nemotron-H, whose head is two layers.
LAYOUTS = (
    Layout(r"model\.layers\.{n}\.", "enorm", "hnorm", "eh_proj", r"shared_head\.norm"),
    Layout(r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", r"layers\.0\."),
    Layout(r"model\.mtp_layers\.0\.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "", True),
    Layout(
        r"mtp\.",
        r"layers\.0\.enorm",
        r"layers\.0\.hnorm",
        r"layers\.0\.eh_proj",
        r"layers\.\d\.final_layernorm",
        r"layers\.(?P<number>\d)\.",
    ),
)


class MTPHead(Head):
    """A one-layer model of the target's family, whose norms and projection join embedding and hidden state."""

    def __init__(self, model: Any, hidden_first: bool = False) -> None:
        super().__init__(model)
        norm, width = final_norm(model), model.config.hidden_size
        dtype = model.get_output_embeddings().weight.dtype
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = torch.nn.Linear(2 * width, width, bias=False, dtype=dtype)
        self.hidden_first = hidden_first

    def joined(self, embeds: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        both = self.embedding_norm(embeds), self.hidden_norm(previous)
        found: torch.Tensor = self.projection(torch.cat(both[::-1] if self.hidden_first else both, -1))
        return found

    def hidden_states(self) -> HiddenStates:
        """Behind its final norm, as the target's."""
        return last_hidden_states(self.model)


def final_norm(model: Any) -> Any:
    """The norm behind a language model's last layer."""
    return [part for name, part in model.get_decoder().named_children() if "norm" in name][-1]


def layout_of(names: Iterable[str], layers: int) -> Layout | None:
    """The layout of the head among a checkpoint's tensors; None without one. `layers`: of the target."""
    found = list(names)
    for layout in LAYOUTS:
        projection = re.compile(rf"{layout.prefix}{layout.projection}\.weight".replace("{n}", str(layers)))
        if any(projection.fullmatch(name) for name in found):
            return layout
    return None


def load_mtp(directory: Path, target: Any) -> MTPHead:
    """The head in the files of the model in `directory`, which is loaded as `target`. Large weights are deferred.

    Raises UsageError for a model without one, ModelFaultError for one that is not read.
    """
    held = held_tensors(directory)
    text = target.config.get_text_config(decoder=True)
    state = {} if held is None else held.deferred(target.dtype)
    layout = layout_of(state, text.num_hidden_layers)
    if held is None or layout is None:
        raise UsageError(
            f"--draft auto: {directory} has no layers that predict further tokens (mtp.*) in safetensors files; give "
            "an EAGLE-3 head or a smaller model with --draft DIR, or leave the option out"
        )
    config = one_layer_config(text)
    model_class = type(target) if target.config is text else class_of_text(config)
    with torch.device("meta"):
        plain = model_class(config)
    names, own = _names(plain, layout, text.num_hidden_layers, state)
    options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, info = model_class.from_pretrained(None, dtype=target.dtype, state_dict=names, **options)
    except Exception as error:  # transformers' own, and held.failure says why where a tensor cannot be read
        raise held.failure or ModelFaultError(
            f"{directory}: transformers cannot load its layer for drafts: {first_line(error)}; leave --draft out"
        ) from error
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if wrong:
        raise ModelFaultError(
            f"{directory}: its layer for drafts is not like the model's last one ({min(wrong)}), and no other is read; "
            "give an EAGLE-3 head or a smaller model with --draft DIR, or leave the option out"
        )
    prepare(model)
    model.generation_config = target.generation_config
    head = MTPHead(model, layout.hidden_first)
    parameters = {name: torch.nn.Parameter(state[key][...].to(target.dtype), False) for name, key in own.items()}
    assign(f"{directory}: its layer for drafts does not fit the model", head, parameters, prefix="model.")
    read_small(head)
    return head.eval()


def one_layer_config(text: Any) -> Any:
    """The configuration of a language model of one layer like its last one, or of those that it states for a head."""
    config = copy.deepcopy(text)
    of_head = getattr(text, "mtp_layers_block_type", None)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(config, name, of_head or value[-1:])
    for name, value in {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _names(plain: Any, layout: Layout, layers: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of the one-layer model `plain` by its names, and the keys in `state` of the rest of the head."""
    prefix, found = layout.prefix.replace("{n}", str(layers)), dict[str, Any]()
    embedding, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    named = {id(weight): name for name, weight in plain.named_parameters(remove_duplicate=False)}
    parts = {
        **{name: getattr(layout, name) for name in ("embedding_norm", "hidden_norm", "projection")},
        named[id(final_norm(plain).weight)]: layout.norm,
        named[id(embedding)]: "embed_tokens",
        named[id(output)]: r"shared_head\.head",
    }
    own: dict[str, str] = {}
    for key in state:
        if (match := re.fullmatch(f"{prefix}(.*)", key)) is None:
            continue
        rest = match[1]
        part = next((name for name, of in parts.items() if re.fullmatch(rf"{of}\.weight", rest)), None)
        if part is not None and "." in part:
            found[part] = state[key]
        elif part is not None:
            own[f"{part}.weight"] = key
        elif (match := re.fullmatch(f"{layout.layer}(.*)", rest)) is not None:
            found[f"model.layers.{match.groupdict().get('number', 0)}.{match[match.lastindex or 1]}"] = state[key]
    for weight, of in ((embedding, "embed_tokens|embeddings"), (output, "lm_head")):
        keys = [key for key in state if re.fullmatch(rf"(.*\.)?({of})\.weight", key)]
        if keys and named[id(weight)] not in found:
            found[named[id(weight)]] = state[min(keys, key=len)]
    return found, own
