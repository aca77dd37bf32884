"""Runs a block of the graph on random inputs, with random matrices of rank 1 in place of its weights.

An MoE block is recognised by what it computes: exporters spell choosing, dispatching and summing in too many ways for a
pattern each. A matrix of rank 1 costs no more than a vector, so that the probe of a block with gigabytes of weights
takes milliseconds and reads none of them.
"""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen_node
from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, optional_operand
from trt_nvfp4.graph_passes.patterns.moe.probe_inputs import draw
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp, Weight
from trt_nvfp4.graph_passes.subgraphs.values import bias_rows, constant
from trt_nvfp4.plugins.ops.activation import Activation, activate, gate

# Sizes of all unknown dimensions but the last, in order; the last takes what makes the tokens of a run.
_SIZES = (2, 3, 5, 7)
_TOKENS = (10, 300)
# Values of a tensor that holds all experts' results for all tokens of a run, where the block computes them all.
_VALUES = 1 << 24
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# What a probe may take, unless the weights of the block take more: a probe has the sizes that a model fixes.
_BYTES = 1 << 30
# Copies in float64 of tokens, logits and values that compute their comparison, for each of three scales.
_COPIES = 3 * 8
# No constant of routing has more values; what has is a weight that no linear reads.
_LARGEST_CONSTANT = 1 << 24


class ProbeError(Exception):
    """The block cannot be run apart from the rest of the model; the message says why."""


class Probe:
    """`nodes`, which compute from `x` and `logits`, with the weights of `linears` replaced; all in float32."""

    def __init__(
        self,
        x: ir.Value,
        logits: ir.Value,
        top_k: int,
        nodes: Sequence[ir.Node],
        linears: Sequence[Linear],
        opset: int,
    ) -> None:
        self._opset = opset
        self._x, self._computed = x, set(nodes)
        self._generator = np.random.default_rng(0)
        self._factors: dict[ir.Value, tuple[np.ndarray, np.ndarray]] = {}
        self._linear_of = {linear.multiply: linear for linear in linears}
        self._protos: list[onnx.NodeProto] = []
        self._constants: dict[str, np.ndarray] = {}
        experts = self._last(logits)
        widest = max(size for linear in linears for size in linear.weight.shape)
        self._dims = self._choose_dims(int(np.clip(_VALUES // (experts * widest), *_TOKENS)))
        shape = self._shape(x)
        if shape is None:
            raise ProbeError(f"the dimensions of '{x.name}' are not known")
        self._run_tokens = int(np.prod(shape[:-1]))
        if not self._run_tokens:
            raise ProbeError(f"'{x.name}' has no tokens: its shape is {list(shape)}")
        self._check_memory(linears, shape[-1] + experts)
        self.samples = draw(self._generator, self._run_tokens, shape[-1], experts, top_k)
        self._shapes = {
            x: shape,
            logits: (self._run_tokens, experts) if len(logits.shape or ()) == 2 else (*shape[:-1], experts),
        }
        replaced = {step for linear in linears for step in linear.weight_nodes}
        for node in nodes:
            if node not in replaced:
                self._add(node)

    def _check_memory(self, linears: Sequence[Linear], values: int) -> None:
        """Raises ProbeError where a run of so many `values` per token would take much more than the block itself."""
        stored = {linear.weight.stored for linear in linears}
        weights = sum(tensor.nbytes for value in stored if (tensor := get_const_tensor(value)) is not None)
        needed = self._run_tokens * values * 8 * _COPIES
        if needed > max(_BYTES, weights):
            raise ProbeError(
                f"its sizes are fixed at {self._run_tokens} tokens, for which telling its routing takes "
                f"{needed / 1e9:.1f} GB; export it with a dynamic number of tokens"
            )

    def run(self, outputs: Sequence[ir.Value]) -> list[list[torch.Tensor]]:
        """The values of `outputs`, in float64 and in their shapes: a list for each run of the samples.

        Raises:
            ProbeError: ONNX Runtime cannot run the block.
        """
        graph = helper.make_graph(
            self._protos,
            "probe",
            [helper.make_tensor_value_info(v.name or "", TensorProto.FLOAT, s) for v, s in self._shapes.items()],
            [onnx.ValueInfoProto(name=value.name) for value in outputs],
            [numpy_helper.from_array(array, name) for name, array in self._constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_reuse = False  # planning that takes time by the square of the nodes
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            runs = []
            for start in range(0, len(self.samples.cases), self._run_tokens):
                rows = (each[start : start + self._run_tokens] for each in (self.samples.tokens, self.samples.logits))
                inputs = zip(self._shapes.items(), rows, strict=True)
                runs.append(session.run(None, {value.name: array.reshape(shape) for (value, shape), array in inputs}))
        except Exception as error:  # ONNX Runtime raises types of its own
            raise ProbeError(f"ONNX Runtime cannot run it by itself: {str(error).splitlines()[0]}") from error
        return [[torch.from_numpy(np.asarray(result, np.float64)) for result in results] for results in runs]

    def shape_of(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of x or the logits in the probe."""
        return self._shapes[value]

    def expert(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        """`mlp` of the rows x, in float64."""
        up = self._linear(mlp.up, x)
        activation = Activation[mlp.activation.upper()]
        if mlp.gate is None:
            hidden = activate(activation, up)
        else:
            hidden = gate(activation, self._linear(mlp.gate, x), up, mlp.alpha, mlp.limit)
        return self._linear(mlp.down, hidden)

    def _linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        row, column = self._factors_of(linear.weight)
        y = (x @ torch.from_numpy(row.astype(np.float64)))[:, None] * torch.from_numpy(column.astype(np.float64))
        return y if linear.bias is None else y + bias_rows(linear.bias, len(column)).double()

    def sigmoid(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """The sigmoid of what `linear` makes of the rows x, in float64."""
        return torch.sigmoid(self._linear(linear, x))

    def _factors_of(self, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
        """W = column row^T, both vectors; the row has in_features."""
        left, right = self._stored_factors(weight.stored)
        if weight.expert is not None:
            left, right = left[weight.expert], right[weight.expert]
        left, right = left.reshape(-1), right.reshape(-1)
        row, column = (left, right) if weight.stored_transposed else (right, left)
        return row, column[weight.rows] * np.float32(weight.scale)

    def _stored_factors(self, stored: ir.Value) -> tuple[np.ndarray, np.ndarray]:
        """Two factors [..., p, 1] and [..., 1, q] for a constant [..., p, q]; their product has rank 1."""
        if stored not in self._factors:
            tensor = get_const_tensor(stored)
            assert tensor is not None
            *lead, p, q = tensor.shape.numpy()
            shapes = ((*lead, p, 1), (*lead, 1, q))
            # Values of every linear's output stay near 1 whichever of the two is multiplied by the input.
            left, right = (self._generator.standard_normal(s).astype(np.float32) / max(p, q) ** 0.25 for s in shapes)
            self._factors[stored] = left, right
        return self._factors[stored]

    def _choose_dims(self, tokens: int) -> dict[str, int]:
        """Sizes of the unknown dimensions of x, for about so many tokens to a run."""
        leading = [dim if isinstance(dim, int) else _name(dim, axis) for axis, dim in enumerate(self._x.shape or ())]
        unknown = dict.fromkeys(dim for dim in leading[:-1] if isinstance(dim, str))
        dims = dict(zip(unknown, _SIZES, strict=False))
        if dims:
            last, _ = dims.popitem()
            known = [dim if isinstance(dim, int) else dims.get(dim, 1) for dim in leading[:-1]]
            dims[last] = max(5, tokens // int(np.prod(known)))
        return dims

    def _shape(self, value: ir.Value, read: slice = slice(None)) -> tuple[int, ...] | None:
        """The shape that `value` has in the probe, where the dimensions to `read` are numbers or those of x.

        TorchScript gives one dimension a name per tensor: those before the last are taken for those of x, in order.
        A wrong guess shows in what the probe computes. A dimension that nothing reads may have any size.
        """
        if value.shape is None:
            return None
        leading = [self._size(dim, axis) for axis, dim in enumerate(self._x.shape or ())][:-1]
        dims = [
            self._size(dim) or (leading[axis] if axis < len(leading) else None) for axis, dim in enumerate(value.shape)
        ]
        return None if None in dims[read] else tuple(1 if dim is None else dim for dim in dims)

    def _size(self, dim: int | ir.SymbolicDim, axis: int = -1) -> int | None:
        return dim if isinstance(dim, int) else self._dims.get(_name(dim, axis))

    @staticmethod
    def _last(value: ir.Value) -> int:
        size = None if value.shape is None else value.shape[-1]
        if not isinstance(size, int):
            raise ProbeError(f"the dimensions of '{value.name}' are not known")
        return size

    def _add(self, node: ir.Node) -> None:
        if (linear := self._linear_of.get(node)) is not None:
            self._add_linear(linear)
            return
        if is_op(node, "Shape"):
            source = operand(node, 0)
            if source not in self._shapes and source.producer() not in self._computed:
                # Torch's exporter asks whichever input has it for a dimension, a cache with a length of its own too.
                read = slice(node.attributes.get_int("start", 0), node.attributes.get_int("end"))
                shape = self._shape(source, read)
                if shape is None:
                    raise ProbeError(f"node '{node.name}' (Shape) reads '{source.name}' from outside")
                proto = ir.serde.serialize_node(node)
                self._constants[f"{source.name}#like"] = np.zeros(shape, np.bool_)
                proto.input[0] = f"{source.name}#like"
                self._protos.append(proto)
                return
        for value in node.inputs:
            if value is not None:
                self._add_constant(node, value)
        self._protos.append(_widened(ir.serde.serialize_node(node)))

    def _add_constant(self, node: ir.Node, value: ir.Value) -> None:
        tensor = get_const_tensor(value)
        if tensor is None or value.name is None or value.name in self._constants:
            return
        if tensor.size > _LARGEST_CONSTANT:
            raise ProbeError(
                f"weight '{value.name}' is read by node '{node.name}' ({node.op_type}), not by a linear of an expert"
            )
        array = np.asarray(constant(value))
        is_half = tensor.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        self._constants[value.name] = array.astype(np.float32) if is_half else array

    def _add_linear(self, linear: Linear) -> None:
        """x (c r^T)^T or (c r^T) x, multiplied by one factor after the other."""
        node, stored = linear.multiply, linear.weight.stored
        y = node.outputs[0].name or ""
        if len(get_const_tensor(stored).shape) == 2:  # type: ignore[union-attr]
            row, column = self._factors_of(linear.weight)
            self._constants[f"{y}#row"], self._constants[f"{y}#column"] = row[:, None], column[None, :]
            bias = optional_operand(node, 2)
            product = y if bias is None else f"{y}#product"
            self._multiply([operand(node, 0).name or "", f"{y}#row", f"{y}#column"], product, left=False)
            if bias is not None:
                self._add_constant(node, bias)
                self._constants[f"{y}#beta"] = np.array(node.attributes.get_float("beta", 1.0), np.float32)
                self._protos.append(helper.make_node("Mul", [bias.name or "", f"{y}#beta"], [f"{y}#bias"]))
                self._protos.append(helper.make_node("Add", [product, f"{y}#bias"], [y]))
            return
        names = []
        for side, factor in zip("LR", self._stored_factors(stored), strict=True):
            name = f"{stored.name}#{side}"
            self._constants[name] = factor
            for step in reversed(linear.weight_nodes):
                proto = _widened(ir.serde.serialize_node(step))
                proto.input[0], proto.output[0] = name, f"{y}#{side}#{step.name}"
                for value in step.inputs[1:]:
                    if value is not None:
                        self._add_constant(step, value)
                self._protos.append(proto)
                name = proto.output[0]
            names.append(name)
        operand_of_weight = linear.weight_nodes[0].outputs[0] if linear.weight_nodes else stored
        left = node.inputs[0] is operand_of_weight
        if linear.weight.stored_transposed == left:  # a Transpose stands between: its factors change places
            names.reverse()
        x = operand(node, 1 if left else 0).name or ""
        self._multiply([*names, x] if left else [x, *names], y, left)

    def _multiply(self, operands: Sequence[str], y: str, left: bool) -> None:
        """y = (A B) X as A (B X), or X (A B) as (X A) B."""
        a, b, c = operands
        inner, outer = ([b, c], [a, f"{y}#inner"]) if left else ([a, b], [f"{y}#inner", c])
        self._protos.append(helper.make_node("MatMul", inner, [f"{y}#inner"]))
        self._protos.append(helper.make_node("MatMul", outer, [y]))


def _name(dim: ir.SymbolicDim, axis: int) -> str:
    """That of a dimension; one without is known by its axis of x."""
    return dim.value or f"#{axis}"


def _widened(proto: onnx.NodeProto) -> onnx.NodeProto:
    """The node, without a name, with float32 in place of 16-bit types."""
    proto.ClearField("name")
    widen_node(proto, _HALF)
    return proto
