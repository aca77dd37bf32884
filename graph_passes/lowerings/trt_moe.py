"""Lowers an MoE block to TensorRT's own MoE layer (`TRT_MoE`): 16-bit experts behind a router in standard operators.

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/transformers-moe.html
"""

from collections.abc import Iterator, Sequence

import onnx.parser
import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import register
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.lowerings.context import LoweringContext
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Moe, Routing
from trt_nvfp4.graph_passes.subgraphs.products import MoeSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.values import (
    MadeWeights,
    Matrix,
    as_torch,
    constant,
    initializer,
    torch_dtype,
)

DOMAIN, OP = "trt", "TRT_MoE"


def _unsupported(moe: Moe, dtype: str) -> str | None:
    """The text of `unsupported`."""
    first = moe.experts[0]
    if moe.shared is not None and moe.routed is None:
        return "its shared expert cannot be separated from the routed ones"
    if first.gate is None or first.activation != "silu":
        gated = "without a gate" if first.gate is None else "gated"
        return f"TensorRT's MoE layer computes gated experts with silu, these are {first.activation}, {gated}"
    if any(linear.bias is not None for linear in first.linears):
        return f"its experts have biases (node '{first.up.multiply.name}')"
    if moe.routing.scale_input:
        return "its scores multiply the experts' inputs, TensorRT's MoE layer multiplies their outputs"
    if moe.routing.scoring == "given":
        scores = "softmax, sigmoid or sqrt(softplus) scores"
        return f"TensorRT's MoE layer takes {scores}, and this block weighs its experts by others"
    if dtype == "float32":
        return "TensorRT's MoE layer computes in 16 bits, the model in float32"
    return None


def unsupported(subgraph: MoeSubgraph) -> Reason | None:
    """The Reason why TensorRT's MoE layer cannot compute the subgraph, or None if it can."""
    assert subgraph.moe is not None
    text = _unsupported(subgraph.moe, subgraph.dtype)
    return None if text is None else Reason(ReasonCode.MOE_LAYER, text)


def lower(context: LoweringContext, subgraph: MoeSubgraph) -> list[str]:
    """Replaces the routed experts of `subgraph`; a shared one stays. Returns the name of the TRT_MoE node."""
    assert subgraph.moe is not None
    graph, made = context.graph, context.made
    moe, name = subgraph.moe.routed or subgraph.moe, subgraph.name
    bias = moe.routing.correction_bias
    given = {
        "logits": moe.logits,
        "x": moe.x,
        "y_like": moe.x if moe.y_like is None else moe.y_like,
        "gate": _stacked(f"{name}/gate", [mlp.linears[0] for mlp in moe.experts], made),
        "up": _stacked(f"{name}/up", [mlp.up for mlp in moe.experts], made),
        "down": _stacked(f"{name}/down", [mlp.down for mlp in moe.experts], made),
        "correction_bias": initializer(
            f"{name}/correction_bias",
            torch.zeros(len(moe.experts)) if bias is None else as_torch(constant(bias)).float().reshape(-1),
            ir.DataType.FLOAT,
        ),
    }
    for value in given.values():
        if value.const_value is not None:
            register(graph, value)
    first = moe.experts[0].up.weight
    text = f"""<ir_version: 10, opset_import: ["": 21, "{DOMAIN}": 1]>
    moe (float logits, float x, float y_like, float gate, float up, float down, float correction_bias) => (float y) {{
        {routing_text(moe.routing, len(moe.experts))}
        rows = Constant<value = int64[3] {{1, -1, {first.shape[1]}}}>()
        choices = Constant<value = int64[3] {{1, -1, {moe.routing.top_k}}}>()
        tokens = Reshape(x, rows)
        experts_int32 = Cast<to = {int(ir.DataType.INT32)}>(experts)
        experts_of_tokens = Reshape(experts_int32, choices)
        weights_typed = Cast<to = {int(first.dtype)}>(weights)
        weights_of_tokens = Reshape(weights_typed, choices)
        outputs = {DOMAIN}.{OP}<activation_type = 1>(tokens, experts_of_tokens, weights_of_tokens, gate, up, down)
        shape = Shape(y_like)
        y = Reshape<allowzero = 1>(outputs, shape)
    }}"""
    fragment = ir.from_proto(onnx.parser.parse_model(text)).graph
    for value in fragment.inputs:
        value.replace_all_uses_with(given[value.name or ""])
    nodes = list(fragment)
    fragment.outputs.clear()
    fragment.remove(nodes)
    for node in nodes:
        node.name = name if node.op_type == OP else f"{name}/{node.outputs[0].name}"
        for value in node.outputs:
            value.name, value.type, value.shape = f"{name}/{value.name}", None, None
    producer = moe.y.producer()
    assert producer is not None
    ir.convenience.replace_nodes_and_values(graph, producer, moe.nodes, nodes, [moe.y], [nodes[-1].outputs[0]])
    return [name]


def routing_text(routing: Routing, experts: int) -> str:
    """ONNX statements for `experts` (int64) and `weights` (float32), [tokens, top_k], from `logits` and
    `correction_bias`; the definition is that of `NVFP4MoE`."""
    before = {
        "softmax": "scores = Softmax<axis = -1>(flat)",
        "sigmoid": "scores = Sigmoid(flat)",
        "sqrt_softplus": "softplus = Softplus(flat)\n        scores = Sqrt(softplus)",
    }
    after = {"softmax_of_chosen": "Softmax<axis = -1>", "sigmoid_of_chosen": "Sigmoid"}
    statements = f"""
        by_token = Constant<value = int64[2] {{-1, {experts}}}>()
        last = Constant<value = int64[1] {{-1}}>()
        tiny = Constant<value = float {{1e-20}}>()
        factor = Constant<value = float {{{routing.scaling_factor!r}}}>()
        k = Constant<value = int64[1] {{{routing.top_k}}}>()
        logits_float = Cast<to = {int(ir.DataType.FLOAT)}>(logits)
        flat = Reshape(logits_float, by_token)
        {before.get(routing.scoring, "scores = Identity(flat)")}
        all_keys = Add(scores, correction_bias)
        {_groups_text(routing, experts)}
        chosen_keys, experts = TopK(keys, k)
        chosen_scores = GatherElements<axis = 1>(scores, experts)
        chosen = {after.get(routing.scoring, "Identity")}(chosen_scores)"""
    if routing.renormalize:
        return f"""{statements}
        total = ReduceSum<keepdims = 1>(chosen, last)
        total_or_tiny = Add(total, tiny)
        normalized = Div(chosen, total_or_tiny)
        weights = Mul(normalized, factor)"""
    return f"{statements}\n        weights = Mul(chosen, factor)"


def _groups_text(routing: Routing, experts: int) -> str:
    """`keys` from `all_keys`: those outside of the best groups become minus infinity."""
    if routing.n_group == 1:
        return "keys = Identity(all_keys)"
    return f"""
        by_group = Constant<value = int64[3] {{-1, {routing.n_group}, {experts // routing.n_group}}}>()
        top = Constant<value = int64[1] {{{routing.group_score_top}}}>()
        best = Constant<value = int64[1] {{{routing.topk_group}}}>()
        lowest = Constant<value = float {{-3.4028234e38}}>()
        grouped = Reshape(all_keys, by_group)
        group_keys, group_positions = TopK(grouped, top)
        group_scores = ReduceSum<keepdims = 0>(group_keys, last)
        best_scores, best_groups = TopK(group_scores, best)
        groups = Shape(group_scores)
        closed = ConstantOfShape<value = int64[1] {{0}}>(groups)
        chosen_groups = Shape(best_groups)
        ones = ConstantOfShape<value = int64[1] {{1}}>(chosen_groups)
        open_numbers = ScatterElements<axis = 1>(closed, best_groups, ones)
        open_groups = Cast<to = {int(ir.DataType.BOOL)}>(open_numbers)
        open_keys = Unsqueeze(open_groups, last)
        kept = Where(open_keys, grouped, lowest)
        keys = Reshape(kept, by_token)"""


def function(opset: int) -> onnx.FunctionProto:
    """TRT_MoE's definition for ONNX Runtime, which multiplies by the chosen experts only."""
    return onnx.parser.parse_function(f"""<opset_import: ["": {opset}], domain: "{DOMAIN}">
    {OP} <activation_type: int = 1> (x, experts, scores, gate, up, down) => (y) {{
        middle = Constant<value = int64[2] {{2, 3}}>()
        last = Constant<value = int64[2] {{3, 4}}>()
        row = Unsqueeze(x, middle)
        chosen_gate = Gather<axis = 0>(gate, experts)
        chosen_up = Gather<axis = 0>(up, experts)
        chosen_down = Gather<axis = 0>(down, experts)
        gated = MatMul(row, chosen_gate)
        sigmoid = Sigmoid(gated)
        activated = Mul(gated, sigmoid)
        product = MatMul(row, chosen_up)
        hidden = Mul(activated, product)
        output = MatMul(hidden, chosen_down)
        scale = Unsqueeze(scores, last)
        weighted = Mul(output, scale)
        y = ReduceSum<keepdims = 0>(weighted, middle)
    }}""")


def _stacked(name: str, linears: Sequence[Linear], made: MadeWeights) -> ir.Value:
    """The weights of one linear of every expert, [experts, in, out], converted while they are written."""
    key = ("trt_moe", *(linear.weight.identity for linear in linears))
    first = linears[0].weight

    def pieces() -> Iterator[torch.Tensor]:
        for linear in linears:
            yield torch.cat(list(Matrix([linear.weight]).chunks())).T.to(torch_dtype(first.dtype))

    if key not in made:
        tensor = StreamedTensor(name, first.dtype, (len(linears), first.shape[1], first.shape[0]), pieces)
        made[key] = (ir.val(name, const_value=tensor),)
    return made[key][0]
