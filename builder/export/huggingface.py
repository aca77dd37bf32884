"""A local Hugging Face model directory becomes ONNX, by torch.onnx's dynamo exporter.

transformers is imported only in functions: users of ONNX files need neither it nor onnxscript.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UnavailableError, UsageError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.fixed_sizes import UNFIXED, FixedSizes
from trt_nvfp4.builder.export.loading import EXPORT_IT, load_directory
from trt_nvfp4.builder.export.plain import BATCH, check_kind, plain
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files
from trt_nvfp4.builder.model.cache_support import check_caches_run
from trt_nvfp4.builder.model.decoder_contract import DECODER, CacheOptions
from trt_nvfp4.builder.model.model_files import check_config, is_model_directory
from trt_nvfp4.builder.model.onnx_file import EXPORTED
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import read_json

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from trt_nvfp4.builder.export.draft_heads.head import HiddenStates
    from trt_nvfp4.builder.parallel.shard import Rank

OPSET = 21
#: The task of an export of what reads text in a model of several kinds of inputs.
TEXT = "text"
OWN_CODE = "it has Python code of its own, which runs only with --trust-remote-code; read it first"
CHANGE_IT = (
    "change the model's code, or export it with other versions of torch and transformers or another tool, and give the "
    "ONNX file"
)
# A dimension that torch lets grow as far counts as one without a bound.
BOUNDLESS = 1 << 16


def config_of(directory: Path, trust_remote_code: bool = False) -> Any:
    """The transformers configuration in a Hugging Face directory. Raises ModelFaultError, and what transformers
    raises for a kind of model that it does not know."""
    check_config(directory)
    import transformers

    with quiet():
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )


def longest_sequence(directory: Path, trust_remote_code: bool = False) -> int | None:
    """How many tokens the configuration in a Hugging Face directory allows for; None where it states no limit, and for
    anything else."""
    if not is_model_directory(directory):
        return None
    config = config_of(directory, trust_remote_code)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # MPT's
    limit = limit or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
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
    fixed: FixedSizes = UNFIXED,
) -> Path:
    """Export the model of a Hugging Face directory to `destination` (ONNX, weights beside it when they are large).
    For the rest see `export_by_reference`, which does without a copy of the weights."""
    _export(directory, destination, task, cache, trust_remote_code, adapter, rank, fixed, by_reference=False)
    return destination


def export_head(
    directory: Path,
    destination: Path,
    cache: CacheOptions,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> Path:
    """Export the head that `cache.draft` names for the model of a Hugging Face directory, as `export` does."""
    own = (trust_remote_code, adapter, None, UNFIXED)
    _export(directory, destination, "generate", cache, *own, by_reference=False, of_head=True)
    return destination


def export_by_reference(
    directory: Path,
    destination: Path,
    task: str = "features",
    cache: CacheOptions | None = None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    fixed: FixedSizes = UNFIXED,
) -> dict[str, ir.TensorProtocol]:
    """As `export`, without copying weights from safetensors that are large together: returns these by their names in
    the graph, read from the directory whenever their values are needed. The file has holes in their places: nothing can
    run it.

    `task`: `generate` exports a causal language model with caches (see `decoder_contract`; `cache` says how large),
    `text` the language model of one that takes images or sound, too, `features` any model without, `auto` chooses by
    the model's class. For models without caches see `plain`; `fixed`
    are sizes of their inputs. `adapter` is merged into the model before; then of several
    ranks' shares that of `rank` is taken. The directory's own Python code runs only with `trust_remote_code`. Raises
    BuilderError: for a model of another kind, for one that
    transformers cannot load or torch cannot export, and where weights that the outputs depend on are missing from the
    files.
    """
    return _export(directory, destination, task, cache, trust_remote_code, adapter, None, fixed, by_reference=True)


def _export(
    directory: Path,
    destination: Path,
    task: str,
    cache: CacheOptions | None,
    trust_remote_code: bool,
    adapter: Adapter | None,
    rank: Rank | None,
    fixed: FixedSizes,
    by_reference: bool,
    of_head: bool = False,
) -> dict[str, ir.TensorProtocol]:
    model, absent = load_model(directory, trust_remote_code, adapter)
    from trt_nvfp4.builder.export import torch_module

    with quiet():
        if task == TEXT:
            check_has_text_part(directory, model)
        else:
            check_kind(directory, model, fixed)
        model, absent, hidden = _with_head(directory, model, absent, cache, of_head)
        longest = longest_sequence(directory, trust_remote_code)
        split: dict[Callable[..., Any], Callable[..., Any]] = {}
        if rank is not None:
            from trt_nvfp4.builder.parallel.collective_ops import TRANSLATIONS
            from trt_nvfp4.builder.parallel.shard import shard

            shard(model, rank, str(directory))
            split = TRANSLATIONS
        if has_caches(task, model):
            wrapper, inputs, dynamic, extra = _with_caches(directory, model, cache or CacheOptions(), longest, hidden)
        else:
            wrapper, inputs, dynamic = plain(model, fixed)
            extra = Extra(longest=longest)
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            translations = extra.translations | split
            program = torch_module.traced(wrapper, inputs, dynamic, extra.opset, translations)
        except Exception as error:
            # The exporter raises types of its own for whatever it cannot translate.
            raise ModelFaultError(
                f"{directory}: torch.onnx cannot export {type(model).__name__}: "
                f"{reason_of(error.__cause__ or error, model)}"
            ) from error
        _check_weights(directory, program, absent)
        _check_dynamic(directory, program, dynamic, type(model).__name__, extra.longest)
        metadata = {EXPORTED: directory.name, **extra.metadata}
        return torch_module.save(program, wrapper, wrapper.outputs, metadata, destination, by_reference)


def _with_head(
    directory: Path, model: Any, absent: Set[str], cache: CacheOptions | None, of_head: bool
) -> tuple[Any, Set[str], HiddenStates | None]:
    """The model that is exported, or its head, with the weights that its files lack and its hidden states."""
    if cache is None or cache.draft is None:
        return model, absent, None
    from trt_nvfp4.builder.export.draft_heads.choose import head_for

    head, hidden = head_for(directory, model, cache.draft)
    return (head, frozenset(), head.hidden_states()) if of_head else (model, absent, hidden)


def load_model(
    directory: Path, trust_remote_code: bool = False, adapter: Adapter | None = None
) -> tuple[Any, Set[str]]:
    """The model of a Hugging Face directory (see `load_directory`), with `adapter` merged into it; and the weights that
    its files lack, which transformers makes up.

    Raises BuilderError: unavailable without transformers, model for a directory that holds none or a broken one.
    """
    if (directory / "adapter_config.json").is_file():
        raise ModelFaultError(
            f"{directory}: holds an adapter (adapter_config.json); give the directory of the model that it was trained "
            f"on, and add --adapter {directory}"
        )
    if not is_model_directory(directory):
        raise ModelFaultError(f"{directory}: not a Hugging Face model directory (it has no config.json)")
    _check_files(directory)
    try:
        import onnxscript  # noqa: F401 (torch.onnx imports it, and calls the lack of it a fault of the model)
        import transformers
    except ImportError as error:
        raise UnavailableError(
            f"exporting {directory} needs transformers and onnxscript: pip install transformers onnxscript ({error})"
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
            raise ModelFaultError(
                f"{directory}: transformers cannot load this model: "
                f"{reason if 'trust_remote_code' in str(error) else error}"
            ) from error
    if adapter is not None:
        adapter.merge(loaded.model)
    return loaded.model, loaded.absent


def _check_files(directory: Path) -> None:
    check_config(directory)
    check_weight_files(directory)


def check_weight_files(directory: Path) -> None:
    """Raise ModelFaultError for files of a model that lie elsewhere, or are pointers to files that were not fetched."""
    for index in sorted(directory.glob("*.index.json")):
        _check_index(directory, index)
    named = [file for pattern in ("*.safetensors", "*.bin", "*.json") for file in directory.glob(pattern)]
    for file in sorted({*named, *tokenizer_files(directory)}):
        try:
            inside(directory, file.name)
        except ValueError as error:
            raise ModelFaultError(str(error)) from error
        if file.name == "config.json":  # parsed above
            continue
        with file.open("rb") as weights:
            if weights.read(24) == b"version https://git-lfs.":
                raise ModelFaultError(f"{file}: a Git LFS pointer in place of the file; fetch them with git lfs pull")


def _check_index(directory: Path, index: Path) -> None:
    """Raise ModelFaultError for an index that names files outside the directory, which transformers would read."""
    try:
        places = read_json(index)["weight_map"].values()
        for name in set(places):
            inside(directory, name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFaultError(
            f"{index}: not an index of this directory's weights ({error}); download it again"
        ) from error


@dataclass(frozen=True)
class Extra:
    """The arguments of an export beside a module and its inputs."""

    opset: int = OPSET
    translations: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    longest: int | None = None


def has_caches(task: str, model: Any) -> bool:
    """Whether the export for a task has key-value caches."""
    return task in ("generate", TEXT) or (task == "auto" and generates(model))


def check_has_text_part(directory: Path, model: Any) -> None:
    """Raise UsageError unless the model takes images or sound beside text, which a language model in it reads."""
    parts = ("vision_config", "audio_config")
    if model.config.is_encoder_decoder or not any(hasattr(model.config, part) for part in parts):
        raise UsageError(
            f"--task {TEXT}: {directory}: {type(model).__name__} takes only text, or generates from an encoder; leave "
            "the option out"
        )


def generates(model: Any) -> bool:
    """Whether the model is a causal language model by its class."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    text = model.config.get_text_config(decoder=True)
    # BERT's kind, whose classes serve as both. GPT-NeoX denies that it is a decoder, and is one.
    is_encoder = getattr(text, "is_decoder", True) is False and text.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return type(model).__name__ in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) and not is_encoder


def _with_caches(
    directory: Path, model: Any, cache: CacheOptions, longest: int | None, hidden: HiddenStates | None
) -> tuple[Any, dict[str, torch.Tensor], tuple[tuple[dict[int, Any], ...]], Extra]:
    """As `plain`, one step over caches, and what its export needs."""
    from trt_nvfp4.builder.export.decoder.ops import OPSET as CACHED_OPSET
    from trt_nvfp4.builder.export.decoder.ops import TRANSLATIONS
    from trt_nvfp4.builder.export.decoders import decoder_step
    from trt_nvfp4.builder.export.recurrent import ops as recurrent

    if not model.can_generate() or model.get_output_embeddings() is None:
        raise ModelFaultError(
            f"{directory}: {type(model).__name__} has no language model head, so that it generates nothing; add --task "
            "features, or name the ...ForCausalLM class in config.json's architectures"
        )
    check_caches_run(directory, "; or add --task features, for a model without caches")
    capacity = cache.checked_capacity(directory, longest)
    program = decoder_step(directory, model, capacity, cache, hidden)
    translations = TRANSLATIONS | recurrent.TRANSLATIONS
    extra = Extra(CACHED_OPSET, translations, {DECODER: program.decoder.json()}, capacity)
    return program.step, program.inputs, program.dynamic, extra


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
        raise ModelFaultError(
            f"{directory}: the files lack {len(missing)} of the model's weights, {missing[0]} for one; download it "
            "again, or fix `architectures` in config.json"
        )


def _check_dynamic(
    directory: Path,
    program: torch.onnx.ONNXProgram,
    dynamic: tuple[tuple[dict[int, Any], ...]],
    named: str,
    longest: int | None,
) -> None:
    """Refuse a graph that takes only inputs of the example's size, or up to a size of torch's own: torch.onnx fixes the
    dimensions that a model loops over. `longest` is the longest sequence that the model takes, where it is known."""
    exported = program.exported_program
    assert exported is not None
    sizes = {node.name: node.meta["val"].shape for node in exported.graph.find_nodes(op="placeholder")}
    for name, dims in zip(exported.graph_signature.user_inputs, *dynamic, strict=True):
        for axis, dim in dims.items():
            size = sizes[name][axis]
            if isinstance(size, int):
                instead = "export it with torch.onnx.export at the size that you need and give the ONNX file"
                if dim.__name__ == BATCH:
                    instead = "add --set batch=N with the number that you need"
                raise ModelFaultError(
                    f"{directory}: torch.onnx fixes the {dim.__name__} of {named} at the {size} of the example, as of "
                    f"models that loop over it (recurrent, state space, detection); {instead}"
                )
            limit = None if dim.__name__ == BATCH else longest
            bounds = exported.range_constraints.get(size.node.expr)
            if bounds is not None and bounds.upper < (limit or BOUNDLESS):
                lower = f"lower config.json's limit of {limit} to that if it is enough, or " if limit else ""
                raise ModelFaultError(
                    f"{directory}: torch.onnx bounds the {dim.__name__} of {named} at {bounds.upper}, as of models "
                    f"that loop over blocks of it; {lower}export it with torch.onnx.export at the size that you need "
                    "and give the ONNX file"
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
