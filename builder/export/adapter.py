"""Merges a LoRA adapter, as PEFT saves it, into the model that it was trained on."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.export.deferred import DeferredTensor, replace_weight
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

_CONFIG, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_MERGE_IT = "merge it with peft (merge_and_unload), save that and give its directory"
# The two factors of a weight's change, with A first, by their names in linears and in embeddings.
_FACTORS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
# Checkpoints of a training run put the adapter's name into the names of factors and whole weights.
_ADAPTER = re.compile(r"(\.lora_[AB]|\.lora_embedding_[AB])\.(?!weight$)[^.]+(?=\.weight$|$)")
_SAVED = re.compile(r"\.modules_to_save\.[^.]+\.")
# Names of embeddings and heads in all families: their rows are tokens.
_VOCABULARY = re.compile(r"embed|wte|lm_head|embed_out|\bhead\b")
# Options by which more changes than weights by the product of two factors, or not for all tokens.
_MORE_THAN_FACTORS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "target_parameters", "layer_replication"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
)
# Ways to begin a training that leave the base as it is.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


# Patterns of modules: names, and a few repetitions of characters. Others may take Python's matcher for ever.
_PLAIN = re.compile(r"[\w.\\*+?^$|\[\]-]{1,500}")
_MOST_REPETITIONS = 4


@dataclass(frozen=True)
class Adapter:
    """A directory with adapter_config.json and adapter_model.safetensors, and a factor of all that it changes."""

    directory: Path
    factor: float = 1.0

    def __str__(self) -> str:
        return f"{self.directory}:{self.factor}"

    def absolute(self) -> "Adapter":
        """The same one, whatever the current folder is."""
        return replace(self, directory=self.directory.absolute())

    @staticmethod
    def parse(text: str) -> "Adapter":
        """The adapter of `DIR` or `DIR:factor`. Raises UsageError for a factor that is not a finite number."""
        directory, colon, factor = text.rpartition(":")
        if not colon or Path(text).is_dir():
            return Adapter(Path(text))
        try:
            value = float(factor)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(f"--adapter {text}: '{factor}' is not a number; give DIR or DIR:scale")
        return Adapter(Path(directory), value)

    def modules(self) -> set[str]:
        """The modules of the model whose weights it changes. Raises ModelFaultError where it cannot be read."""
        names = {_module(key) for key in self._stored(self._files())}
        return {name.removesuffix(".weight").removesuffix(".bias") for name in names}

    def merge(self, model: torch.nn.Module) -> None:
        """Change the model's weights, in float32 and rounded once to their type.

        Raises ModelFaultError: no LoRA adapter, one of another model, or of a kind that is not merged here.
        """
        files, config = self._files(), self._config()
        stored = self._stored(files)
        changes: list[tuple[str, str]] = []
        for a_name, b_name in _FACTORS:
            for key in sorted(key for key in stored if key.endswith(f".{a_name}")):
                other = key.removesuffix(a_name) + b_name
                if other not in stored:
                    raise self._error(f"it has {key} and no {other}; download it again")
                changes.append((key, other))
        for key, _ in changes:
            self._check_alone(model, _module(key))
        # First whole weights: those of embeddings, which peft saves beside their changes.
        for key in sorted(stored.keys() - {key for pair in changes for key in pair}):
            self._replace(model, key, files.read(stored[key]))
        for key, other in changes:
            self._merge(model, _module(key), files.read(stored[key]), files.read(stored[other]), config)

    def _check_alone(self, model: torch.nn.Module, name: str) -> None:
        """Refuse a change of one of the modules that have a weight in common: as trained, the others keep theirs."""
        weight = getattr(self._find(model, name), "weight", None)
        others = [
            other
            for other, module in model.named_modules()
            if other != name and isinstance(weight, Tensor) and getattr(module, "weight", None) is weight
        ]
        if others:
            raise self._error(
                f"it changes {name}, which shares its weight with {', '.join(others)}; the adapter was trained to "
                f"change only one of them; save the base with two weights (tie_word_embeddings=False), or {_MERGE_IT}"
            )

    def _merge(self, model: torch.nn.Module, name: str, a: Tensor, b: Tensor, config: Mapping[str, Any]) -> None:
        module = self._find(model, name)
        weight = getattr(module, "weight", None)
        rank = a.shape[0] if a.dim() == 2 else 0
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise self._error(f"{name} is a {type(module).__name__}, whose change is not merged here; {_MERGE_IT}")
        if rank == 0 or b.dim() != 2 or b.shape[1] != rank:
            raise self._error(f"{name} must change by factors of one rank, found {list(a.shape)} and {list(b.shape)}")
        # The rows of A are inputs; embeddings and GPT-2's linears hold them first.
        is_transposed = isinstance(module, torch.nn.Embedding) or type(module).__name__ == "Conv1D"
        changed = (a.shape[1], b.shape[0]) if is_transposed else (b.shape[0], a.shape[1])
        if changed != weight.shape:
            raise self._misfit(name, weight.shape, changed)
        alpha = self._of_module(config.get("alpha_pattern"), name, config.get("lora_alpha"))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise self._error(f"{_CONFIG} must state lora_alpha, a number, found {alpha!r}")
        scale = self.factor * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

        def merged() -> Tensor:
            change = b.float() @ a.float()
            whole = weight.detach().float() + scale * (change.T if is_transposed else change)
            if not whole.isfinite().all():
                raise self._error(f"{name} becomes infinite or NaN")
            return whole.to(weight.dtype)

        first = merged()  # which says here what is wrong
        value = DeferredTensor.of(changed, weight.dtype, merged) if isinstance(weight, DeferredTensor) else first
        replace_weight(model, weight, torch.nn.Parameter(value, requires_grad=False))

    def _replace(self, model: torch.nn.Module, key: str, value: Tensor) -> None:
        """A whole parameter, of `modules_to_save` or a bias."""
        module_name, _, parameter = key.removeprefix(_PREFIX).replace(".base_layer.", ".").rpartition(".")
        if "lora_" in key:
            raise self._error(f"{key} is of a kind of LoRA that is not merged here; {_MERGE_IT}")
        module = self._find(model, module_name)
        own = getattr(module, parameter, None)
        if not isinstance(own, torch.nn.Parameter) or own.shape != value.shape:
            raise self._misfit(key, own.shape if isinstance(own, Tensor) else (), value.shape)
        if self.factor != 1:
            raise self._error(
                f"{key} replaces a weight of the model, which no scale is for; leave :{self.factor:g} out"
            )
        setattr(module, parameter, torch.nn.Parameter(value.to(own.dtype), requires_grad=False))

    def _misfit(self, name: str, own: Sequence[int], adapters: Sequence[int]) -> BuilderError:
        """An error for a weight of one shape in the model and another in the adapter, with what to do."""
        found = f"{name} is {list(own) if own else 'absent'} in the model and {list(adapters)} in the adapter"
        if _VOCABULARY.search(name) and len(own) == 2 and own[1:] == tuple(adapters[1:]) and own[0] < adapters[0]:
            return self._error(
                f"{found}, which was trained with {adapters[0] - own[0]} tokens more; give the base with its "
                f"vocabulary grown (model.resize_token_embeddings({adapters[0]})) and with the adapter's tokenizer, "
                f"or {_MERGE_IT}"
            )
        return self._error(f"{found}: it was trained on another one")

    def _stored(self, files: SafetensorsFiles) -> dict[str, str]:
        """The adapter's tensors by the names that peft gives them: those of a training's own checkpoint hold the
        adapter's name, too (`lora_A.default.weight`). Raises ModelFaultError for several adapters."""
        stored: dict[str, str] = {}
        for key in files:
            if ".original_module." in key:  # what `modules_to_save` replaces
                continue
            name = _SAVED.sub(".", _ADAPTER.sub(r"\1", key))
            if name in stored:
                raise self._error(f"holds {stored[name]} and {key}, of two adapters; save one by itself with peft")
            stored[name] = key
        return stored

    def _find(self, model: torch.nn.Module, name: str) -> torch.nn.Module:
        try:
            return model.get_submodule(name)
        except AttributeError as error:
            raise self._error(
                f"it changes {name}, which {type(model).__name__} does not have: it is of another model"
            ) from error

    def _of_module(self, pattern: Any, module: str, default: Any) -> Any:
        """The value of a module in peft's patterns: names or regular expressions of their last parts."""
        for key, value in pattern.items() if isinstance(pattern, dict) else ():
            if not _PLAIN.fullmatch(key) or sum(map(key.count, "*+?")) > _MOST_REPETITIONS:
                raise self._error(f"the pattern {key!r} in {_CONFIG} is not read here; {_MERGE_IT}")
            with suppress(re.error):
                if re.match(rf"(.*\.)?({key})$", module):
                    return value
        return default

    def _config(self) -> Mapping[str, Any]:
        file = self.directory / _CONFIG
        try:
            config = read_json(file)
        except (OSError, ValueError) as error:
            raise self._error(f"{_CONFIG} cannot be read ({error}); give the directory that peft saved") from error
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA":
            raise self._error(f"peft_type in {_CONFIG} is {kind!r}, and only LORA is merged here; {_MERGE_IT}")
        rank = config.get("r")
        if not isinstance(rank, int) or rank < 1:
            raise self._error(f"its rank (r in {_CONFIG}) is {rank!r}: it changes nothing")
        for option in _MORE_THAN_FACTORS:
            if config.get(option):
                raise self._error(f"{option} in {_CONFIG} is not merged here; {_MERGE_IT}")
        if config.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
            raise self._error(
                f"init_lora_weights in {_CONFIG} is {config['init_lora_weights']!r}, which changes the base; "
                f"{_MERGE_IT}"
            )
        return dict(config)

    def _files(self) -> SafetensorsFiles:
        file = self.directory / _WEIGHTS
        if not file.is_file():
            raise self._error(f"holds no {_WEIGHTS}; save it with peft's save_pretrained (safetensors)")
        try:
            return SafetensorsFiles(file)
        except CalibrationError as error:
            raise self._error(str(error)) from error

    def _error(self, what: str) -> BuilderError:
        return ModelFaultError(f"{self.directory}: {what}")


def _module(key: str) -> str:
    """The module that a tensor changes, as the model names it; of whole parameters, their own name."""
    name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
    for factors in _FACTORS:
        for factor in factors:
            name = name.removesuffix(f".{factor}")
    return name
