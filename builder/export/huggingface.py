"""A local Hugging Face model directory becomes ONNX, by torch.onnx's dynamo exporter.

transformers is imported when called alone: users of ONNX files need neither it nor onnxscript.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_nvfp4.builder.cache_support import check_caches_run
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, UNAVAILABLE, BuilderError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.decoder_contract import DECODER, CacheOptions
from trt_nvfp4.builder.export.loading import EXPORT_IT, load_directory
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files
from trt_nvfp4.builder.onnx_file import EXPORTED
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.model_config import check_counts

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from trt_nvfp4.builder.parallel.shard import Rank

OPSET = 21
# How the names of forward's parameters end that take images, sound or proteins.
MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "flattened_patches",
    "image_patches",
    "input_features",
    "input_values",
    "protein_input_ids",
)
OWN_CODE = "it has Python code of its own, which runs only with --trust-remote-code; read it first"
CHANGE_IT = (
    "change the model's code, or export it with other versions of torch and transformers or another tool, and give the "
    "ONNX file"
)
# A dimension that torch lets grow as far counts as one without a bound.
BOUNDLESS = 1 << 16


def is_model_directory(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file()


def longest_sequence(directory: Path, trust_remote_code: bool = False) -> int | None:
    """How many tokens the configuration in a Hugging Face directory allows for; None where it states no limit, and for
    anything else."""
    if not is_model_directory(directory):
        return None
    check_config(directory)
    import transformers

    with quiet():
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # MPT's
    if not isinstance(limit, int) or limit <= 0:
        return None
    try:
        modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    except ImportError:  # another model's code, such as Llama's
        return limit
    # RoBERTa's table has rows for the padding and what is below it, where other models' first position is row 0.
    behind_padding = any(
        hasattr(part, "create_position_ids_from_input_ids") for part in (modeling, *vars(modeling).values())
    )
    if behind_padding and config.pad_token_id is not None:
        limit -= config.pad_token_id + 1
    return limit if limit > 0 else None


def export(
    directory: Path,
    destination: Path,
    task: str = "features",
    cache: CacheOptions | None = None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    rank: Rank | None = None,
) -> Path:
    """Export the model of a Hugging Face directory to `destination` (ONNX, weights beside it when they are large).
    For the rest see `export_by_reference`, which does without a copy of the weights."""
    _export(directory, destination, task, cache, trust_remote_code, adapter, rank, by_reference=False)
    return destination


def export_by_reference(
    directory: Path,
    destination: Path,
    task: str = "features",
    cache: CacheOptions | None = None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> dict[str, ir.TensorProtocol]:
    """As `export`, without copying weights from safetensors that are large together: returns these by their names in
    the graph, read from the directory whenever their values are asked for. What the file has in their places is no
    weight: nothing can run it.

    `task`: `generate` exports a causal language model with caches (see `decoder_contract`; `cache` says how large),
    `features` any model without, `auto` chooses by the model's class. Without caches, text models take input_ids and
    attention_mask (int64 [batch, sequence], both dynamic), image models pixel_values (float [batch, channels, height,
    width], batch dynamic). The outputs are those of the model's head under their names in transformers, most often
    `logits` alone; without a head `last_hidden_state`. `adapter` is merged into the model before; then of several
    ranks' shares that of `rank` is taken. The directory's own Python code runs only with `trust_remote_code`. Raises
    BuilderError: for a model of another kind, for one that
    transformers cannot load or torch cannot export, and where weights that the outputs depend on are missing from the
    files.
    """
    return _export(directory, destination, task, cache, trust_remote_code, adapter, None, by_reference=True)


def _export(
    directory: Path,
    destination: Path,
    task: str,
    cache: CacheOptions | None,
    trust_remote_code: bool,
    adapter: Adapter | None,
    rank: Rank | None,
    by_reference: bool,
) -> dict[str, ir.TensorProtocol]:
    model, absent = load_model(directory, trust_remote_code, adapter)
    from trt_nvfp4.builder.export import torch_module

    with quiet():
        check_kind(directory, model)
        longest = longest_sequence(directory, trust_remote_code)
        split: dict[Callable[..., Any], Callable[..., Any]] = {}
        if rank is not None:
            from trt_nvfp4.builder.parallel.collective_ops import TRANSLATIONS
            from trt_nvfp4.builder.parallel.shard import shard

            shard(model, rank, str(directory))
            split = TRANSLATIONS
        if task == "generate" or (task == "auto" and generates(model)):
            wrapper, inputs, dynamic, extra = _with_caches(directory, model, cache or CacheOptions(), longest)
        else:
            wrapper, inputs, dynamic = _plain(model)
            extra = Extra(longest=longest)
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            translations = extra.translations | split
            program = torch_module.traced(wrapper, inputs, dynamic, extra.opset, translations)
        except Exception as error:
            # The exporter raises types of its own for whatever it cannot translate.
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{directory}: torch.onnx cannot export {type(model).__name__}: "
                f"{reason_of(error.__cause__ or error, model)}",
            ) from error
        _check_weights(directory, program, absent)
        _check_dynamic(directory, program, dynamic, type(model).__name__, extra.longest)
        metadata = {EXPORTED: directory.name, **extra.metadata}
        return torch_module.save(program, wrapper, wrapper.outputs, metadata, destination, by_reference)


def load_model(
    directory: Path, trust_remote_code: bool = False, adapter: Adapter | None = None
) -> tuple[Any, Set[str]]:
    """The model of a Hugging Face directory (see `load_directory`), with `adapter` merged into it; and the weights that
    its files lack, which transformers makes up.

    Raises BuilderError: unavailable without transformers, model for a directory that holds none or a broken one.
    """
    if (directory / "adapter_config.json").is_file():
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: holds an adapter (adapter_config.json); give the directory of the model that it was trained "
            f"on, and add --adapter {directory}",
        )
    if not is_model_directory(directory):
        raise BuilderError(MODEL_AT_FAULT, f"{directory}: not a Hugging Face model directory (it has no config.json)")
    _check_files(directory)
    try:
        import onnxscript  # noqa: F401 (torch.onnx imports it, and calls the lack of it a fault of the model)
        import transformers
    except ImportError as error:
        raise BuilderError(
            UNAVAILABLE,
            f"exporting {directory} needs transformers and onnxscript: pip install transformers onnxscript ({error})",
        ) from error
    transformers.utils.logging.disable_progress_bar()
    with quiet():
        try:
            loaded = load_directory(directory, transformers, trust_remote_code)
        except BuilderError:
            raise
        except Exception as error:
            # Unreadable files raise types of the libraries that read them.
            reason = f"{OWN_CODE}, or {EXPORT_IT}"
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{directory}: transformers cannot load this model: "
                f"{reason if 'trust_remote_code' in str(error) else error}",
            ) from error
    if adapter is not None:
        adapter.merge(loaded.model)
    return loaded.model, loaded.absent


def check_config(directory: Path) -> None:
    """Raise BuilderError (model) for a configuration that is none, or asks for more layers or the like than there are
    in any model."""
    try:
        config = read_json(directory / "config.json")
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: not JSON ({error})") from error
    try:
        check_counts(config)
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: {error}; correct it") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: no model_type, so not a transformers model")


def _check_files(directory: Path) -> None:
    check_config(directory)
    for index in sorted(directory.glob("*.index.json")):
        _check_index(directory, index)
    named = [file for pattern in ("*.safetensors", "*.bin", "*.json") for file in directory.glob(pattern)]
    for file in sorted({*named, *tokenizer_files(directory)}):
        try:
            inside(directory, file.name)
        except ValueError as error:
            raise BuilderError(MODEL_AT_FAULT, str(error)) from error
        with file.open("rb") as weights:
            if weights.read(24) == b"version https://git-lfs.":
                raise BuilderError(
                    MODEL_AT_FAULT, f"{file}: a Git LFS pointer in place of the file; fetch them with git lfs pull"
                )


def _check_index(directory: Path, index: Path) -> None:
    """Refuse an index that names files outside the directory, which transformers would read."""
    try:
        places = read_json(index)["weight_map"].values()
        for name in set(places):
            inside(directory, name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuilderError(
            MODEL_AT_FAULT, f"{index}: not an index of this directory's weights ({error}); download it again"
        ) from error


def check_kind(directory: Path, model: Any) -> None:
    """Raise BuilderError (model) unless all that the model takes is text, or images of a size that its configuration
    states."""
    takes = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if name == "input_ids" or name.endswith(MEDIA) or (_is_required(parameter) and name != "attention_mask")
    ]
    named = f"{directory}: {type(model).__name__}"
    if takes not in (["input_ids"], ["pixel_values"]):
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{named} takes {' and '.join(takes) or 'other inputs'}, and models of input_ids or pixel_values alone "
            f"are exported here; {EXPORT_IT}",
        )
    if getattr(model.config, "is_encoder_decoder", False) and model.can_generate():
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{named} generates with an encoder and a decoder, which are engines of their own; export each of them "
            "with torch.onnx.export and give the ONNX files one by one",
        )
    if takes == ["pixel_values"] and _of_images(model, "image_size") is None:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory / 'config.json'}: states no image_size, of its own or in a vision_config or backbone_config; "
            f'add the height and width of the images, such as "image_size": [224, 224], or {EXPORT_IT}',
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty


def images_of(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    size, channels = _of_images(model, "image_size"), _of_images(model, "num_channels") or 3
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return channels, height, width


def _of_images(model: Any, name: str) -> Any:
    """What the configuration says of images: itself, or a part of it where the model was half of a pair or has a
    backbone that is a model of its own."""
    parts = (model.config, *(getattr(model.config, part, None) for part in ("vision_config", "backbone_config")))
    return next((value for part in parts if (value := getattr(part, name, None)) is not None), None)


@dataclass(frozen=True)
class Extra:
    """What an export has beside a module and its inputs."""

    opset: int = OPSET
    translations: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    longest: int | None = None


def generates(model: Any) -> bool:
    """Whether the model is a causal language model by its class."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    text = model.config.get_text_config(decoder=True)
    # BERT's kind, whose classes serve as both. GPT-NeoX says that it is no decoder, and is one.
    is_encoder = getattr(text, "is_decoder", True) is False and text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return type(model).__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) and not is_encoder


def _with_caches(
    directory: Path, model: Any, cache: CacheOptions, longest: int | None
) -> tuple[Any, dict[str, torch.Tensor], tuple[tuple[dict[int, Any], ...]], Extra]:
    """As `_plain`, one step over caches, and what its export needs."""
    from trt_nvfp4.builder.export.decoder_ops import OPSET as CACHED_OPSET
    from trt_nvfp4.builder.export.decoder_ops import TRANSLATIONS
    from trt_nvfp4.builder.export.decoders import decoder_step

    if not model.can_generate() or model.get_output_embeddings() is None:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: {type(model).__name__} has no language model head, so that it generates nothing; add --task "
            "features, or name the ...ForCausalLM class in config.json's architectures",
        )
    check_caches_run(directory, "; or add --task features, for a model without caches")
    capacity = cache.checked_capacity(directory, longest)
    program = decoder_step(directory, model, capacity, cache)
    extra = Extra(CACHED_OPSET, TRANSLATIONS, {DECODER: program.decoder.json()}, capacity)
    return program.step, program.inputs, program.dynamic, extra


def _plain(model: Any) -> tuple[Any, dict[str, torch.Tensor], tuple[tuple[dict[int, Any], ...]]]:
    """A module from tensors to a tuple of tensors, example inputs, and dynamic shapes.

    Once it has run, the module's `outputs` names the tensors of that tuple.
    """
    import torch

    is_image = model.main_input_name == "pixel_values"

    class Plain(torch.nn.Module):
        outputs: tuple[str, ...] = ()

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if is_image:
                result = self.model(pixel_values=tensors[0])
            else:
                extra = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
                result = self.model(input_ids=tensors[0], attention_mask=tensors[1], **extra)
            found = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
            inner = ("pooler_output", *(name for name in found if name.endswith("hidden_state")))
            head = {name: value for name, value in found.items() if name not in inner}
            chosen = head or {name: found[name] for name in ("last_hidden_state",) if name in found} or found
            Plain.outputs = tuple(chosen)
            return tuple(chosen.values())

    if is_image:
        pixels = torch.rand(2, *images_of(model), dtype=next(model.parameters()).dtype)
        return Plain().eval(), {"pixel_values": pixels}, (({0: torch.export.Dim("batch")},),)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Plain().eval(), inputs, (({0: batch, 1: sequence},) * 2,)


def _check_weights(directory: Path, program: torch.onnx.ONNXProgram, absent: Set[str]) -> None:
    """Refuse weights that transformers made up, unless nothing that is exported depends on them (BERT's pooler)."""
    exported = program.exported_program
    assert exported is not None
    parameters = exported.graph_signature.inputs_to_parameters
    used = {
        parameters[node.name].removeprefix("model.")
        for node in exported.graph.nodes
        if node.users and node.name in parameters
    }
    if missing := sorted(used & absent):
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: the files lack {len(missing)} of the model's weights, {missing[0]} for one; download it "
            "again, or mend `architectures` in config.json",
        )


def _check_dynamic(
    directory: Path,
    program: torch.onnx.ONNXProgram,
    dynamic: tuple[tuple[dict[int, Any], ...]],
    named: str,
    longest: int | None,
) -> None:
    """Refuse a graph that takes inputs of the example's size, or up to a size of torch's own, alone: torch.onnx fixes
    what a model loops over. `longest` is the longest sequence that the model takes, where it is known."""
    exported = program.exported_program
    assert exported is not None
    sizes = {node.name: node.meta["val"].shape for node in exported.graph.find_nodes(op="placeholder")}
    for name, dims in zip(exported.graph_signature.user_inputs, *dynamic, strict=True):
        for axis, dim in dims.items():
            size = sizes[name][axis]
            if isinstance(size, int):
                raise BuilderError(
                    MODEL_AT_FAULT,
                    f"{directory}: torch.onnx fixes the {dim.__name__} of {named} at the {size} of the example, as of "
                    "models that loop over it (recurrent, state space); export it with torch.onnx.export at the size "
                    "that you need and give the ONNX file",
                )
            limit = None if dim.__name__ == "batch" else longest
            bounds = exported.range_constraints.get(size.node.expr)
            if bounds is not None and bounds.upper < (limit or BOUNDLESS):
                lower = f"lower config.json's limit of {limit} to that if it is enough, or " if limit else ""
                raise BuilderError(
                    MODEL_AT_FAULT,
                    f"{directory}: torch.onnx bounds the {dim.__name__} of {named} at {bounds.upper}, as of models "
                    f"that loop over blocks of it; {lower}export it with torch.onnx.export at the size that you need "
                    "and give the ONNX file",
                )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's notes about itself from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        notes = io.StringIO()  # torch prints the graphs that it cannot trace
        with warnings.catch_warnings(), contextlib.redirect_stdout(notes), contextlib.redirect_stderr(notes):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def reason_of(error: BaseException, model: torch.nn.Module) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "data-dependent" in line:
        of_experts = any("expert" in name for name, _ in model.named_modules())
        such = ", such as a loop over the experts that tokens were sent to" if of_experts else ""
        return f"what it runs depends on its inputs' values{such}, and a graph runs all of it ({line}); {CHANGE_IT}"
    if line.endswith(":"):  # the last sentence introduces a list
        line = line.rpartition(". ")[0] or line
    return f"{line.rstrip('.:')}; {CHANGE_IT}"
