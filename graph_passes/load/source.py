"""Reads an ONNX model without its weights: structure in memory, tensors on demand, external data memory-mapped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes import common as passes

from trt_nvfp4.common.external_data import external_files, follow_links
from trt_nvfp4.common.nested_graphs import bodies
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.graph_passes.ir.nodes import drops, is_op, operand
from trt_nvfp4.graph_passes.ir.passes import Observer, Pass, on_graph, run_passes
from trt_nvfp4.graph_passes.ir.tensors import read_tensor
from trt_nvfp4.graph_passes.load.activation_types import Activations
from trt_nvfp4.graph_passes.load.by_hand import check_plugin_nodes, complete_plugin_nodes
from trt_nvfp4.graph_passes.load.conditions import check_branches
from trt_nvfp4.graph_passes.load.deduplicate_weights import unite_copies
from trt_nvfp4.graph_passes.load.einsum_to_matmul import multiply_matrices
from trt_nvfp4.graph_passes.load.fold_constant_weights import fold_weights
from trt_nvfp4.graph_passes.load.node_checks import check_nodes
from trt_nvfp4.graph_passes.load.normalize import OLDEST_OPSET, all_nodes, is_gelu_of_onnxruntime, normalize
from trt_nvfp4.graph_passes.load.shape_folding import simplify_shapes
from trt_nvfp4.graph_passes.load.skip_norms import is_skip_norm
from trt_nvfp4.graph_passes.load.sparse_to_dense import densify
from trt_nvfp4.graph_passes.load.split_stacked_weights import split_stacks
from trt_nvfp4.graph_passes.load.squeeze_weights import squeeze_weights
from trt_nvfp4.graph_passes.load.tensor_checks import check_tensors
from trt_nvfp4.graph_passes.load.value_checks import check_values
from trt_nvfp4.plugins.ops import DOMAIN

# Domains of operators that ONNX Runtime or TensorRT know without a function body.
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "trt"})
# What ONNX Runtime and TensorRT have in the default domain, and ONNX does not: the norm of models that
# onnxruntime-genai makes. ONNX cannot convert it from an older opset.
_KNOWN_OPERATORS = frozenset({"SimplifiedLayerNormalization"})
# What ONNX Runtime's optimizers make, in com.microsoft, and TensorRT has not.
_FUSED_BY_ONNXRUNTIME = frozenset(
    {
        *("BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "BiasSplitGelu", "FastGelu", "QuickGelu"),
        *("FusedConv", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "TransposeMatMul"),
        *("EmbedLayerNormalization", "SkipLayerNormalization", "SkipGroupNorm"),
        *("NhwcConv", "NhwcFusedConv", "NhwcMaxPool"),
    }
)
# What begins the names of its operators, in com.microsoft, that multiply or look up quantized weights.
_QUANTIZED_BY_ONNXRUNTIME = (
    *("ConvInteger", "DynamicQuantize", "GatherBlockQuantized", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger"),
    *("MatMulNBits", "QAttention", "QEmbed", "QGemm", "QLinear", "QMoE", "QOrdered"),
)


class ModelError(TrtNvfp4Error, ValueError):
    """The model is at fault: unreadable, incomplete, or not valid ONNX."""

    exit_code = 3


@dataclass(frozen=True)
class SourceModel:
    """An ONNX model, normalized (see `normalize`) and with every node named.

    `ir_model` holds the structure; initializers in external data stay on disk until `tensor` maps them. `activations`:
    how a float32 model was converted to 16 bits, if it was (see `mixed_precision`).
    """

    file: OnnxFile
    ir_model: ir.Model
    activations: Activations = field(default_factory=Activations)

    @property
    def path(self) -> Path:
        """Where the model's file lies."""
        return self.file.path

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.ir_model.graph

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return self.ir_model.opset_imports[""]

    def tensor(self, name: str) -> np.ndarray:
        """The values of a constant by name (a private memory map where external; bfloat16 and FP8 as ml_dtypes).

        Raises:
            ModelError: the constant is missing.
        """
        value = self.graph.initializers.get(name)
        if value is None:
            value = next((out for node in self.graph for out in node.outputs if out.name == name), None)
        tensor = None if value is None else get_const_tensor(value)
        if tensor is None:
            raise ModelError(f"{self.path}: there is no constant named '{name}'")
        return read_tensor(tensor)


def load(
    model: str | Path | OnnxFile,
    observer: Observer | None = None,
    weights: Mapping[str, ir.TensorProtocol] | None = None,
) -> SourceModel:
    """Loads and checks a model; `observer` sees the graph after each pass. `weights`: by name, those
    that are read in place of what its external data holds.

    Raises:
        ModelError: see `checked`; an unknown operator, or what ONNX cannot process.
    """
    file = OnnxFile.of(model)
    path, proto = file.path, checked(model)
    folder = follow_links(proto, path.parent)
    try:
        densify(proto)
        check_plugin_nodes(proto)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    _check_operators(path, proto)
    used = {name for node in all_nodes(proto.graph.node) for name in node.input}
    used |= {output.name for output in proto.graph.output}
    stored = {tensor.name for tensor in proto.graph.initializer}
    try:
        ir_model = ir.from_proto(normalize(proto))
    except Exception as error:  # ONNX raises whatever its converter, shape inference or deserializer met
        raise ModelError(f"{path}: ONNX cannot process the model: {error}") from error
    ir.external_data.set_base_dir(ir_model.graph, folder)
    for name, tensor in (weights or {}).items():
        if name in ir_model.graph.initializers:
            _put(path, ir_model.graph.initializers[name], tensor)
        elif name not in stored or name in used:
            raise ModelError(f"{path}: there is no weight '{name}', whose values lie elsewhere")
    passes.RemoveInitializersFromInputsPass()(ir_model)
    try:
        complete_plugin_nodes(ir_model.graph)
        check_branches(ir_model.graph)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    if observer is not None:
        observer("normalize", ir_model)
    run_passes(ir_model, PASSES, observer)
    return SourceModel(file, ir_model)


def _put(path: Path, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Make `tensor` the value of an initializer. Raises ModelError for one of another shape or type."""
    hole = value.const_value
    if hole is not None and (hole.dtype, hole.shape) != (tensor.dtype, tensor.shape):
        raise ModelError(
            f"{path}: the weight '{value.name}' is {hole.dtype} {hole.shape}, its values are {tensor.dtype} "
            f"{tensor.shape}"
        )
    value.const_value = tensor


def checked(model: str | Path | OnnxFile) -> onnx.ModelProto:
    """The contents of an ONNX file, the caller's own to change, after the checks that every model must pass before
    anything else reads it.

    Raises:
        ModelError: not ONNX, truncated, a tensor, value or node that is not what its type needs, external data missing,
            too short or outside of its folder, names defined twice or nodes out of order.
    """
    path = OnnxFile.of(model).path
    proto = model.copied() if isinstance(model, OnnxFile) else _parse(path)
    _check_header(path, proto)
    try:
        check_tensors(proto)
        check_values(proto)
        check_nodes(proto)
        external_files(proto, path.parent)
        _check_names(proto.graph, set())
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    return proto


def _remove_idle_casts(graph: ir.Graph) -> None:
    """TorchScript leaves Casts of float32 to float32 where a module calls float()."""
    for node in graph.all_nodes():
        if is_op(node, "Cast") and not node.outputs[0].is_graph_output():
            value = operand(node, 0)
            if value.dtype == node.attributes["to"].as_int():
                node.outputs[0].replace_all_uses_with(value)


def _unite_nodes(model: ir.Model) -> None:
    """Equal nodes become one, as gate and up may each have a Cast of their own; but for random ones.

    onnx_ir does not know all that are random: an attribute tells these apart for the time of its pass.
    """
    random = [node for node in model.graph if is_op(node, "Bernoulli") or drops(node)]
    for number, node in enumerate(random):
        node.attributes.add(ir.AttrInt64("apart", number))
    passes.CommonSubexpressionEliminationPass()(model)
    for node in random:
        del node.attributes["apart"]


#: What a model goes through before subgraphs are looked for.
PASSES = (
    Pass("einsum-to-matmul", on_graph(multiply_matrices)),
    Pass("remove-idle-casts", on_graph(_remove_idle_casts)),
    Pass("unite-equal-nodes", _unite_nodes),
    Pass("fold-shapes", on_graph(simplify_shapes)),
    Pass("squeeze-weights", on_graph(squeeze_weights)),
    Pass("split-stacked-weights", on_graph(split_stacks)),
    Pass("fold-constant-weights", on_graph(fold_weights)),
    Pass("unite-copies-of-weights", on_graph(unite_copies)),
    Pass("remove-unused-nodes", passes.RemoveUnusedNodesPass()),
    Pass("name-nodes", passes.NameFixPass()),
)


def _parse(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # protobuf's DecodeError, or a UnicodeDecodeError of the text formats
        raise ModelError(f"{path}: not an ONNX file, or a truncated one ({error})") from error


def _check_header(path: Path, proto: onnx.ModelProto) -> None:
    if not proto.graph.node or not proto.opset_import:
        raise ModelError(f"{path}: not an ONNX model: it has no {'nodes' if proto.opset_import else 'opset import'}")
    if all(opset.domain not in ("", "ai.onnx") for opset in proto.opset_import):
        raise ModelError(f"{path}: its opset imports lack that of the default domain")


def _check_operators(path: Path, proto: onnx.ModelProto) -> None:
    functions = {(f.domain, f.name) for f in proto.functions}
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    fused: dict[str, str] = {}
    quantized: dict[str, str] = {}
    for node in all_nodes(proto.graph.node):
        if node.domain == DOMAIN or (node.domain, node.op_type) in functions:
            continue
        where = f"{path}: unknown operator '{node.op_type}' (node '{node.name}', domain '{node.domain or 'ai.onnx'}')"
        if node.domain not in _KNOWN_DOMAINS:
            raise ModelError(f"{where}: no such domain and no function of that name in the model")
        # TensorRT's own operators live in the default domain under these names.
        if node.domain in ("", "ai.onnx") and not (node.op_type.endswith("_TRT") or node.op_type.startswith("TRT_")):
            version = opsets.get("", opsets.get("ai.onnx", 1))
            is_known = node.op_type in _KNOWN_OPERATORS and version >= OLDEST_OPSET
            if not is_known and not onnx.defs.has(node.op_type, max_inclusive_version=version):
                raise ModelError(
                    f"{where}: not in opset {version}; of a model that ONNX Runtime has optimized, give the original"
                )
        is_fused = node.domain == "com.microsoft" and node.op_type in _FUSED_BY_ONNXRUNTIME
        if is_fused and not is_gelu_of_onnxruntime(node) and not is_skip_norm(node):
            fused.setdefault(node.op_type, node.name)
        if node.domain == "com.microsoft" and node.op_type.startswith(_QUANTIZED_BY_ONNXRUNTIME):
            quantized.setdefault(node.op_type, node.name)
    for found, instead in (
        (fused, "as it was exported, before ONNX Runtime optimized it, or its Hugging Face directory"),
        (quantized, "in float, or with QuantizeLinear and DequantizeLinear nodes, or its Hugging Face directory"),
    ):
        if found:
            listed = ", ".join(f"{op_type} (node '{name}')" for op_type, name in found.items())
            raise ModelError(
                f"{path}: it has operators of ONNX Runtime's that TensorRT does not have: {listed}; give the model "
                f"{instead}"
            )


def _check_names(graph: onnx.GraphProto, outer: set[str]) -> None:
    """Every name is defined once and before its use."""
    initializers = {tensor.name for tensor in graph.initializer}
    initializers |= {tensor.values.name for tensor in graph.sparse_initializer}
    known = outer | initializers | {value.name for value in graph.input} | {""}
    for node in graph.node:
        for name in node.input:
            if name not in known:
                raise ValueError(
                    f"node '{node.name}' ({node.op_type}) reads '{name}', which nothing before it produces: "
                    "the graph is incomplete or not in topological order"
                )
        for body in bodies(node):
            _check_names(body, known)
        for name in filter(None, node.output):
            if name in known:
                raise ValueError(f"'{name}' is defined twice (by node '{node.name}', {node.op_type})")
            known.add(name)
    if not all(value.name for value in (*graph.input, *graph.output)):
        raise ValueError("an input or output of the graph has no name")
    for value in graph.output:
        if value.name not in known:
            raise ValueError(f"nothing produces the graph output '{value.name}'")
