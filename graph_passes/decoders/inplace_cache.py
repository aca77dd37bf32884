"""KV-cache conversion: caches that grow with every step become caches of fixed capacity that are updated in place.

Past and new keys that are joined, or an attention operator of ONNX Runtime, become TensorScatter and Attention with a
mask computed from positions. The result takes `input_ids [batch, new]`, `past_length [batch]`, `new_length [batch]`
and the caches `past_key_values.{layer}.key|value [batch, kv_heads, capacity, head_dim]`, and gives out `logits
[batch, 1, vocab]` of each sequence's last valid token and `present.{layer}.key|value`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes import common as passes

from trt_nvfp4.graph_passes.decoders.norms import lower_norms
from trt_nvfp4.graph_passes.decoders.positions import computed_positions, telling_lengths
from trt_nvfp4.graph_passes.decoders.rotary import lower_rotary
from trt_nvfp4.graph_passes.ir.nodes import constant_integers, is_op, operand
from trt_nvfp4.graph_passes.ir.opsets import changed_before
from trt_nvfp4.graph_passes.patterns.attention.concatenated import match_concatenated
from trt_nvfp4.graph_passes.patterns.attention.group_query import match_group_query
from trt_nvfp4.graph_passes.patterns.attention.mask import window_of
from trt_nvfp4.graph_passes.patterns.attention.multi_head import match_multi_head
from trt_nvfp4.graph_passes.patterns.attention.types import CachedAttention, DecoderError

Attributes = Mapping[str, int | float | str | list[int]]
OPSET, IR_VERSION = 24, 11
# Operators between a model's last product and its logits that treat every token alike.
_PER_TOKEN = ("Cast", "Identity", "Add", "Mul", "Div", "Tanh")


@dataclass(frozen=True)
class InPlaceCaches:
    """The converted decoder's caches, per layer."""

    kv_heads: list[int]
    head_dim: list[int]
    value_head_dim: list[int]
    dtype: ir.DataType
    vocab_size: int
    #: The original's caches, (input, output) of each layer's keys and values, and the lengths to compare both at.
    original: list[tuple[str, str]]
    lengths: list[int]
    #: The shortest window of any layer; None where all look back on everything.
    window: int | None


def keeps_cache(model: ir.Model) -> bool:
    """Whether the model takes caches that grow: 4-D inputs of floats whose length is not fixed."""
    return any(_is_cache(value) for value in model.graph.inputs)


def convert(model: ir.Model, capacity: int) -> InPlaceCaches:
    """Change `model`, as `load` gives it, as described above. Raises DecoderError with the node's name."""
    graph = model.graph
    layers = list(_attentions(graph))
    if not layers:
        raise DecoderError("no attention over its caches was found")
    used = {value for layer in layers for value in layer.past}
    if unknown := [value.name for value in graph.inputs if _is_cache(value) and value not in used]:
        raise DecoderError(f"what cache '{unknown[0]}' is for was not found")
    if (changed := next(changed_before(model, OPSET), None)) is not None:
        raise DecoderError(f"node '{changed.name}' ({changed.op_type}) means another thing in opset {OPSET}")
    shapes = [_cache_shape(layer, index) for layer in layers for index in (0, 1)]
    by_name = {str(layer.past[i].name): shapes[2 * n + i] for n, layer in enumerate(layers) for i in (0, 1)}
    original = [(str(layer.past[i].name), str(layer.present[i].name)) for layer in layers for i in (0, 1)]
    lengths = telling_lengths(graph, capacity)
    windows = [
        layer.window if layer.mask is None else window_of(model, layer.mask, lengths, by_name, str(layer.node.name))
        for layer in layers
    ]
    positions = computed_positions(model, by_name, lengths)
    rewriter = _Rewriter(model, capacity)
    for number, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        rewriter.replace(number, layer, shapes[2 * number : 2 * number + 2], window)
    rewriter.finish(positions)
    lower_norms(graph)
    lower_rotary(graph)
    passes.RemoveUnusedNodesPass()(model)
    rewriter.remove_inputs()
    if others := [node for node in graph.all_nodes() if node.domain == "com.microsoft"]:
        raise DecoderError(
            f"node '{others[0].name}' ({others[0].op_type}) is an operator of ONNX Runtime's own; "
            "export the model without it"
        )
    model.opset_imports[""] = OPSET
    model.opset_imports.pop("com.microsoft", None)
    model.ir_version = max(IR_VERSION, model.ir_version)
    dtype = layers[0].past[0].dtype
    assert dtype is not None
    vocab = graph.outputs[0].shape[2] if graph.outputs[0].shape is not None else None
    if not isinstance(vocab, int):
        raise DecoderError("the size of its vocabulary is not known: logits have no static last dimension")
    finite = [window for window in windows if window is not None]
    return InPlaceCaches(
        kv_heads=[heads for heads, _ in shapes[::2]],
        head_dim=[dim for _, dim in shapes[::2]],
        value_head_dim=[dim for _, dim in shapes[1::2]],
        dtype=dtype,
        vocab_size=vocab,
        original=original,
        lengths=lengths,
        window=min(finite, default=None),
    )


def _is_cache(value: ir.Value) -> bool:
    return (
        value.shape is not None
        and len(value.shape) == 4
        and value.dtype is not None
        and value.dtype.is_floating_point()
        and not isinstance(value.shape[2], int)
    )


def _attentions(graph: ir.Graph) -> Iterator[CachedAttention]:
    for node in graph:
        for match in (match_group_query, match_multi_head, match_concatenated):
            if (found := match(node)) is not None:
                yield found
                break


def _cache_shape(layer: CachedAttention, index: int) -> tuple[int, int]:
    """(kv_heads, head_dim) of a layer's keys (0) or values (1); where the input does not say, by what is projected."""
    value, new = layer.past[index], (layer.key, layer.value)[index]
    assert value.shape is not None
    heads = value.shape[1] if isinstance(value.shape[1], int) else layer.kv_heads
    dim = value.shape[3]
    if not isinstance(dim, int) and layer.flat and layer.flat_keys and heads is not None:
        wide = layer.query if new is None else new
        if (before := wide.producer()) is not None and before.op_type == "RotaryEmbedding":
            wide = operand(before, 0)  # of the same shape, which of ONNX Runtime's operators is not known
        count = heads if new is not None else (layer.heads or 0) + 2 * heads
        width = wide.shape[-1] if wide.shape is not None else None
        dim = width // count if isinstance(width, int) else dim
    if not isinstance(heads, int) or not isinstance(dim, int):
        raise DecoderError(f"the shape of cache '{value.name}' has no static heads or head size")
    return heads, dim


class _Rewriter:
    """Adds the shared parts (positions, masks) once, and replaces one attention after the other."""

    def __init__(self, model: ir.Model, capacity: int) -> None:
        self._graph, self._capacity = model.graph, capacity
        self._masks: dict[int | None, ir.Value] = {}
        self._head: list[ir.Node] = []
        ids = next((value for value in model.graph.inputs if value.name in ("input_ids", "inputs")), None)
        if ids is None:
            raise DecoderError("it has no input input_ids")
        ids.name, ids.shape = "input_ids", ir.Shape(["batch", "new"])
        self._past_length, self._new_length = (
            ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch"]))
            for name in ("past_length", "new_length")
        )
        self._ids = ids
        shape = self._add("Shape", [ids], {"start": 1, "end": 2})
        count = self._add("Squeeze", [shape])
        offsets = self._add("Range", [self._scalar(0), count, self._scalar(1)])
        column = self._add("Unsqueeze", [self._past_length, self._ints([1])])
        self.positions = self._add("Add", [column, offsets], name="decoder/positions")
        self.positions.shape, self.positions.dtype = ir.Shape(["batch", "new"]), ir.DataType.INT64

    def replace(self, number: int, layer: CachedAttention, shapes: list[tuple[int, int]], window: int | None) -> None:
        """Put TensorScatter and Attention in the place of `layer`."""
        nodes: list[ir.Node] = []

        def add(op: str, inputs: list[ir.Value], attributes: Attributes | None = None, outputs: int = 1) -> ir.Node:
            node = ir.node(
                op, inputs, attributes or {}, num_outputs=outputs, name=f"decoder/{number}/{op}.{len(nodes)}"
            )
            nodes.append(node)
            return node

        query, key, value = layer.query, layer.key, layer.value
        if layer.flat:
            (kv_heads, dim), heads = shapes[0], layer.heads or shapes[0][0]
            if key is None or value is None:
                sizes = self._ints([heads * dim, kv_heads * dim, kv_heads * dim])
                query, key, value = add("Split", [query, sizes], {"axis": -1}, 3).outputs
            split = []
            for part, count in ((query, heads), (key, kv_heads), (value, kv_heads)):
                if part is not query and not layer.flat_keys:
                    split.append(part)
                    continue
                wide = add("Reshape", [part, self._ints([0, 0, count, dim])]).outputs[0]
                split.append(add("Transpose", [wide], {"perm": [0, 2, 1, 3]}).outputs[0])
            query, key, value = split
            if layer.rotary is not None:
                query, key = (self._turned(add, part, layer, dim) for part in (query, key))
        assert key is not None
        assert value is not None
        presents = []
        for index, new in enumerate((key, value)):
            past, (heads, dim) = layer.past[index], shapes[index]
            kind = ("key", "value")[index]
            past.name = f"past_key_values.{number}.{kind}"
            past.shape = ir.Shape(["batch", heads, self._capacity, dim])
            scattered = add("TensorScatter", [past, new, self._past_length], {"axis": -2, "mode": "linear"}).outputs[0]
            scattered.name = f"present.{number}.{kind}"
            scattered.shape, scattered.type = past.shape, past.type
            presents.append(scattered)
        attributes: Attributes = {} if layer.scale is None else {"scale": layer.scale}
        result = add("Attention", [query, *presents, self._mask(window)], attributes).outputs[0]
        if layer.flat:
            turned = add("Transpose", [result], {"perm": [0, 2, 1, 3]}).outputs[0]
            result = add("Reshape", [turned, self._ints([0, 0, -1])]).outputs[0]
        result.type, result.shape = layer.result.type, layer.result.shape
        place = layer.result.producer()
        assert place is not None
        self._graph.insert_before(place, nodes)
        layer.result.replace_all_uses_with(result)
        for old, new_value in zip(layer.present, presents, strict=True):
            if not old.is_graph_output():
                raise DecoderError(f"the cache of node '{layer.node.name}' is not an output of the model")
            self._graph.outputs[list(self._graph.outputs).index(old)] = new_value
            # What was computed of the old one, shapes among it, goes with it.
            old.name = f"decoder/old/{old.name}"

    def finish(self, computed: list[tuple[ir.Value, int]]) -> None:
        """Positions, also the `computed` ones along their axis; the last token's logits, the order of inputs and
        outputs."""
        graph = self._graph
        for value in list(graph.inputs):
            if value.name == "position_ids":
                value.replace_all_uses_with(self.positions)
        for value, axis in computed:
            value.replace_all_uses_with(self._positions_like(value, axis))
        graph.insert_before(next(iter(graph)), self._head)
        logits = next((value for value in graph.outputs if value.name == "logits"), None)
        if logits is None:
            raise DecoderError("it has no output logits")
        logits = self._last(logits)
        presents = [value for value in graph.outputs if (value.name or "").startswith("present.")]
        graph.outputs[:] = [logits, *sorted(presents, key=lambda value: _order(str(value.name)))]

    def _positions_like(self, value: ir.Value, axis: int) -> ir.Value:
        """Positions with `value`'s type and rank: sequences along axis 0, tokens along `axis`."""
        positions, rank = self.positions, len(value.shape or (1, 1))
        if axes := [index for index in range(1, rank) if index != axis]:
            positions = self._add("Unsqueeze", [positions, self._ints(axes)])
        if value.dtype not in (None, ir.DataType.INT64):
            positions = self._add("Cast", [positions], {"to": int(value.dtype)})
        return positions

    def remove_inputs(self) -> None:
        """Removes all inputs but the contract's. Raises DecoderError where another one, or the length of a cache, is
        still used: positions that are computed from it are the same for all sequences."""
        caches = {
            value.name: value for value in self._graph.inputs if (value.name or "").startswith("past_key_values.")
        }
        for value in caches.values():
            self._take_batch_from_ids(value)
            if users := [node for node in value.consumers() if not is_op(node, "TensorScatter")]:
                raise DecoderError(
                    f"node '{users[0].name}' ({users[0].op_type}) reads cache '{value.name}' beside its attention; "
                    "export it with an input position_ids"
                )
        kept = [self._ids, self._past_length, self._new_length]
        for value in self._graph.inputs:
            if value not in kept and value.name not in caches and value.consumers():
                user = value.consumers()[0]
                raise DecoderError(f"node '{user.name}' ({user.op_type}) needs the input '{value.name}'")
        self._graph.inputs[:] = [*kept, *sorted(caches.values(), key=lambda value: _order(str(value.name)))]

    def _take_batch_from_ids(self, cache: ir.Value) -> None:
        """How many sequences a cache has is how many the tokens have."""
        for node in cache.consumers():
            if not is_op(node, "Shape"):
                continue
            users = node.outputs[0].consumers()
            batch_alone = all(is_op(user, "Gather") and constant_integers(user.inputs[1]) == [0] for user in users)
            if batch_alone or (node.attributes.get_int("start", 0), node.attributes.get_int("end", 4)) == (0, 1):
                node.replace_input_with(0, self._ids)

    def _last(self, logits: ir.Value) -> ir.Value:
        """Logits of each sequence's last valid token: rows are chosen in front of the last product."""
        value = logits
        while is_op(node := value.producer(), *_PER_TOKEN) and (of_tokens := _only_of_tokens(node)) is not None:
            value = of_tokens
        product = value.producer()
        rows = operand(product, 0) if is_op(product, "MatMul") and _constant(operand(product, 1)) else None
        index = ir.node("Unsqueeze", [_sub := ir.val("decoder/last"), self._ints([1])], name="decoder/last/Unsqueeze")
        one = ir.node("Sub", [self._new_length, self._ints([1])], outputs=[_sub], name="decoder/last/Sub")
        source = logits if rows is None else rows
        gather = ir.node("GatherND", [source, index.outputs[0]], {"batch_dims": 1}, name="decoder/last/GatherND")
        row = ir.node("Unsqueeze", [gather.outputs[0], self._ints([1])], name="decoder/last/row")
        chosen = row.outputs[0]
        chosen.type = source.type
        if rows is None:
            logits.name, chosen.name = "decoder/all_logits", "logits"
            last = logits.producer()
            assert last is not None
            self._graph.insert_after(last, [one, index, gather, row])
            logits_shape = logits.shape
            logits = chosen
            logits.shape = logits_shape
        else:
            assert product is not None
            self._graph.insert_before(product, [one, index, gather, row])
            product.replace_input_with(0, chosen)
        vocab = logits.shape[2] if logits.shape is not None else None
        logits.shape = ir.Shape(["batch", 1, vocab])
        return logits

    def _turned(self, add: Callable[..., ir.Node], part: ir.Value, layer: CachedAttention, dim: int) -> ir.Value:
        rotary = layer.rotary
        assert rotary is not None
        half = rotary.cos.shape[-1] if rotary.cos.shape is not None else None
        if not isinstance(half, int):
            raise DecoderError(f"the rotary tables of node '{layer.node.name}' have no static width")
        attributes = {"interleaved": rotary.interleaved}
        if 2 * half < dim:
            attributes["rotary_embedding_dim"] = 2 * half
        return add("RotaryEmbedding", [part, rotary.cos, rotary.sin, self.positions], attributes).outputs[0]

    def _mask(self, window: int | None) -> ir.Value:
        """Bool [batch, 1, new, capacity]: which keys a token sees. One for all layers of a window."""
        if window not in self._masks:
            if not self._masks:
                self._query_at = self._add("Unsqueeze", [self.positions, self._ints([1, 3])])
                rows = np.arange(self._capacity, dtype=np.int64).reshape(1, 1, 1, -1)
                self._key_at = self._constant("decoder/rows", rows)
            mask = self._add("LessOrEqual", [self._key_at, self._query_at])
            if window is not None:
                oldest = self._add("Sub", [self._query_at, self._scalar(window)])
                mask = self._add("And", [mask, self._add("Greater", [self._key_at, oldest])])
            self._masks[window] = mask
        return self._masks[window]

    def _add(
        self, op: str, inputs: list[ir.Value], attributes: Attributes | None = None, name: str | None = None
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes or {}, name=f"decoder/{op}.{len(self._head)}")
        self._head.append(node)
        node.outputs[0].name = name or node.name
        return node.outputs[0]

    def _scalar(self, number: int) -> ir.Value:
        return self._constant(f"decoder/scalar_{number}", np.array(number, np.int64))

    def _ints(self, numbers: list[int]) -> ir.Value:
        return self._constant(f"decoder/ints_{'_'.join(map(str, numbers))}", np.array(numbers, np.int64))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self._graph.initializers:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.INT64
            self._graph.register_initializer(value)
        return self._graph.initializers[name]


def _only_of_tokens(node: ir.Node) -> ir.Value | None:
    """The operand of an elementwise node that has the tokens, where its others are constants for all tokens alike."""
    inputs = [value for value in node.inputs if value is not None]
    variable = [value for value in inputs if not _constant(value)]
    alike = all(
        tensor.shape.numpy()[:-1].count(1) == max(0, len(tensor.shape) - 1)
        for tensor in map(get_const_tensor, inputs)
        if tensor is not None
    )
    return variable[0] if len(variable) == 1 and alike else None


def _constant(value: ir.Value) -> bool:
    return value.const_value is not None or is_op(value.producer(), "Constant")


def _order(name: str) -> tuple[int, str]:
    _, layer, part = name.split(".")
    return int(layer), part
