"""Finds the attention blocks of a decoder whose caches are updated in place, by structure and by what they compute."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.graph_passes.ir.nodes import ints_attribute, is_op, operand
from trt_nvfp4.graph_passes.patterns.attention.core import Core, match_core
from trt_nvfp4.graph_passes.patterns.attention.evaluate import Part
from trt_nvfp4.graph_passes.patterns.attention.positions import TOLERANCE, laid_out, rotation_of, window_of
from trt_nvfp4.graph_passes.patterns.attention.projections import by_head, in_front_of_layout, in_front_of_rotation
from trt_nvfp4.graph_passes.patterns.isolation import escaping_use
from trt_nvfp4.graph_passes.patterns.rms_norm import match_rms_norm
from trt_nvfp4.graph_passes.subgraphs.attention import CacheAttention, Layout, Projection, Rotation
from trt_nvfp4.graph_passes.subgraphs.values import norm_weight
from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.cached_attention import MAX_HEAD_DIM, ROPE_NONE

_NEW = 3  # tokens of the comparison


@dataclass(frozen=True)
class UnsupportedAttention:
    """Attention over a cache that CachedAttention does not compute."""

    core: ir.Node
    reason: str


def match_attentions(model: ir.Model) -> list[CacheAttention | UnsupportedAttention]:
    """Every attention over a cache that a TensorScatter updates, in graph order.

    Masks and rotary embeddings are recognised by their values, and each kind of block is run in ONNX Runtime beside
    CachedAttention's reference: one that computes something else is unsupported, with the difference.
    """
    if not any(is_op(node, "TensorScatter") for node in model.graph):
        return []
    matcher = _Matcher(model)
    found: list[CacheAttention | UnsupportedAttention] = []
    for node in model.graph:
        core = match_core(node)
        if core is None:
            continue
        if isinstance(core, str):
            found.append(UnsupportedAttention(node, core))
            continue
        try:
            found.append(matcher.match(core))
        except ValueError as error:
            found.append(UnsupportedAttention(node, str(error)))
    return found


class _Matcher:
    """Finds once what blocks of a model share: masks, tables, and blocks that differ only in the weights of norms."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._position = {node: index for index, node in enumerate(model.graph)}
        self._depends: dict[ir.Value, bool] = {}
        self._windows: dict[tuple[ir.Value, int], int] = {}
        self._rotations: dict[tuple[object, ...], Rotation | None] = {}
        self._differences: dict[tuple[object, ...], float] = {}
        self._contents: dict[ir.Value, object] = {}

    def match(self, core: Core) -> CacheAttention:
        """Raises ValueError with the reason why CachedAttention does not serve it."""
        past = tuple(operand(scatter, 0) for scatter in (core.key, core.value))
        heads, kv_heads, head_dim, capacity = _sizes(core, past)
        lengths = {operand(scatter, 2) for scatter in (core.key, core.value)}
        if len(lengths) != 1 or not (past_length := lengths.pop()).is_graph_input():
            raise ValueError("its caches are not appended to at one input of lengths")
        if (core.mask, capacity) not in self._windows:
            self._windows[core.mask, capacity] = window_of(self._model, core.mask, capacity)
        new = [operand(scatter, 1) for scatter in (core.key, core.value)]
        query, key, rotation = self._rotated((core.query, heads), (new[0], kv_heads), head_dim, capacity)
        value, _ = self._projection(new[1], kv_heads, head_dim, capacity, only_layout=True)
        result, layout = _flat(core.result, heads * head_dim)
        block = CacheAttention(
            core=core.node,
            query=query,
            key=key,
            value=value,
            appended=(new[0], new[1]),
            past=(past[0], past[1]),
            present=(core.key.outputs[0], core.value.outputs[0]),
            past_length=past_length,
            result=result,
            result_layout=layout,
            head_dim=head_dim,
            capacity=capacity,
            rotation=rotation,
            sinks=core.sinks,
            window=self._windows[core.mask, capacity],
            scale=core.scale,
            softcap=core.softcap,
            nodes=(),
        )
        block = replace(block, nodes=tuple(self._nodes(block)))
        self._check(block)
        return block

    def _rotated(
        self, query: tuple[ir.Value, int], key: tuple[ir.Value, int], head_dim: int, capacity: int
    ) -> tuple[Projection, Projection, Rotation]:
        """Sources of queries and keys, and the rotation that both pass. One that CachedAttention does not have stays in
        front of it."""
        none = np.zeros((1, 1), np.float32)
        (q, q_rotation), (k, k_rotation) = (
            self._projection(value, heads, head_dim, capacity) for value, heads in (query, key)
        )
        if q_rotation is None or k_rotation is None or not _equal(q_rotation, k_rotation):
            return by_head(*query), by_head(*key), Rotation(ROPE_NONE, none, none)
        normed = [_with_norm(source, head_dim) for source in (q, k)]
        norms = [source.norm for source in normed]
        if norms[0] is None or norms[1] is None or norms[0].epsilon != norms[1].epsilon:
            return q, k, q_rotation
        if any(self._is_shared(norm.value, after.value) for norm, after in zip(normed, (q, k), strict=True)):
            return q, k, q_rotation  # values that are keys, normed the same way, read the keys' norm, too
        return normed[0], normed[1], q_rotation

    def _projection(
        self, value: ir.Value, heads: int, head_dim: int, capacity: int, only_layout: bool = False
    ) -> tuple[Projection, Rotation | None]:
        source = in_front_of_rotation(value, heads, head_dim, self._position, self._depends)
        sizes = (source.value.dtype, source.layout, heads, head_dim, capacity)
        key = (self._fingerprint([value], [source.value], ()), *sizes)
        if key not in self._rotations:
            self._rotations[key] = rotation_of(self._model, source, value, head_dim, capacity)
        rotation = self._rotations[key]
        if only_layout and (rotation is None or rotation.kind != ROPE_NONE):
            return by_head(value, heads), None
        return source, rotation

    def _fingerprint(
        self, outputs: Sequence[ir.Value], stop: Sequence[ir.Value], weights: Sequence[ir.Value]
    ) -> tuple[object, ...]:
        """Equal for parts of the graph that compute the same from `stop` and `weights`, whatever these hold. Constants
        count by content, values that come from lengths by identity."""
        names: dict[ir.Value, object] = {value: ("stop", index) for index, value in enumerate(stop)}
        names |= {value: ("weight", index) for index, value in enumerate(weights)}
        lines: list[object] = []
        nodes = self._between(outputs, stop)
        for number, node in enumerate(sorted(nodes, key=self._position.__getitem__)):
            attributes = tuple((name, _attribute(a)) for name, a in sorted(node.attributes.items()))
            operands = tuple(None if v is None else names.get(v) or self._content(v) for v in node.inputs)
            lines.append((node.domain, node.op_type, operands, attributes))
            names |= {output: (number, index) for index, output in enumerate(node.outputs)}
        return (tuple(lines), tuple(names.get(value) for value in outputs))

    def _content(self, value: ir.Value) -> object:
        """A constant by its numbers, any other value by itself."""
        if value not in self._contents:
            tensor = get_const_tensor(value)
            self._contents[value] = value if tensor is None else _numbers(tensor)
        return self._contents[value]

    def _between(self, outputs: Sequence[ir.Value], stop: Sequence[ir.Value]) -> set[ir.Node]:
        """The nodes that compute `outputs` from `stop`: those that data passes."""
        nodes: set[ir.Node] = set()
        through: dict[ir.Value, bool] = dict.fromkeys(stop, True)

        def passes(value: ir.Value) -> bool:
            node = value.producer()
            if value not in through:
                through[value] = False
                # A shape is known without the data.
                operands = [] if node is None or is_op(node, "Shape") else [v for v in node.inputs if v is not None]
                passing = [passes(operand) for operand in operands]  # all of them, for the nodes among them
                if node is not None and any(passing):
                    through[value] = True
                    nodes.add(node)
            return through[value]

        for value in outputs:
            passes(value)
        return nodes

    def _is_shared(self, first: ir.Value, last: ir.Value) -> bool:
        """Whether something else reads what is computed between the two."""
        nodes = self._between([last], [first])
        return escaping_use([v for node in nodes for v in node.outputs if v is not last], nodes) is not None

    def _nodes(self, block: CacheAttention) -> Iterator[ir.Node]:
        """The block's nodes in graph order. Raises ValueError where something else needs what they compute."""
        sources = [part.value for part in (block.query, block.key, block.value)]
        nodes = self._between([block.result, *block.present], [*sources, *block.past])
        kept = {block.result, *block.present}
        inner = [v for node in sorted(nodes, key=self._position.__getitem__) for v in node.outputs if v not in kept]
        # What a Split gives to other layers stays.
        if (reason := escaping_use(inner, nodes)) is not None:
            raise ValueError(reason)
        yield from sorted(nodes, key=self._position.__getitem__)

    def _check(self, block: CacheAttention) -> None:
        sources = [part.value for part in (block.query, block.key, block.value)]
        norms = [norm.weight for norm in block.norms or () if norm.weight is not None]
        key = (
            self._fingerprint([block.result, *block.present], [*sources, *block.past], norms),
            *((part.value.dtype, part.layout, part.heads) for part in (block.query, block.key, block.value)),
            str(block.past[0].shape),
            *attributes(block).items(),
        )
        if key not in self._differences:
            self._differences[key] = difference(self._model, block)
        limit = 10 * TOLERANCE.get(block.query.value.dtype or ir.DataType.FLOAT, 0.0)
        if not self._differences[key] <= limit:
            raise ValueError(f"CachedAttention would compute something else: by {self._differences[key]:.2g} of it")


def difference(model: ir.Model, block: CacheAttention) -> float:
    """How far CachedAttention's reference is from what the block computes on random values, relative to the norm."""
    generator = np.random.default_rng(0)
    new = min(_NEW, block.capacity)
    kv_heads, dim = block.key.heads, block.head_dim
    sources = (block.query, block.key, block.value)
    part = Part(
        model,
        [*(source.value for source in sources), *block.past],
        [block.result, *block.present],
    )
    worst = 0.0
    for past in sorted({0, (block.capacity - new) // 2, block.capacity - new}):
        x = [generator.standard_normal((1, source.heads, new, dim)).astype(np.float32) for source in sources]
        caches = [generator.standard_normal((1, kv_heads, block.capacity, dim)).astype(np.float32) for _ in range(2)]
        given = [laid_out(array, source.layout) for array, source in zip(x, sources, strict=True)]
        found = part.run([past], new, [*given, *caches])
        qkv = np.concatenate([laid_out(array, Layout.FLAT) for array in x], -1)
        inputs = [torch.from_numpy(array) for array in (qkv, *caches)]
        expected = OPS["CachedAttention"].reference(
            *inputs, torch.tensor([past]), *constants(block, torch.float32), **attributes(block)
        )
        assert isinstance(expected, tuple)
        y = expected[0].numpy()
        actual = found[0] if block.result_layout == Layout.FLAT else laid_out(found[0], Layout.FLAT)
        computed = [y, *(cache.numpy() for cache in expected[1:])]
        worst = max(worst, relative_error(found=[actual, *found[1:]], expected=computed))
    return worst


def attributes(block: CacheAttention) -> dict[str, int | float]:
    """CachedAttention's, but for the type of its caches."""
    norms = block.norms
    return {
        "heads": block.query.heads,
        "rope": block.rotation.kind,
        "qk_norm": int(norms is not None),
        "has_sinks": int(block.sinks is not None),
        "window": block.window,
        "scale": block.scale,
        "softcap": block.softcap,
    } | ({} if norms is None else {"epsilon": norms[0].epsilon})


def constants(
    block: CacheAttention,
    dtype: torch.dtype,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The op's inputs behind `past_length`; norms' weights in `dtype` (float32: as the network computes with them),
    scales [kv_heads] of E4M3 caches, default 1."""
    dim, ones = block.head_dim, torch.ones(block.key.heads)
    as_computed = dtype == torch.float32
    weights = [norm_weight(norm, dim, as_computed) for norm in block.norms or (None, None)]
    sinks = torch.zeros(block.query.heads) if block.sinks is None else torch.from_numpy(block.sinks)
    return [
        torch.from_numpy(block.rotation.cos),
        torch.from_numpy(block.rotation.sin),
        *(weight.to(dtype) for weight in weights),
        sinks,
        ones if key_scale is None else key_scale,
        ones if value_scale is None else value_scale,
    ]


def _sizes(core: Core, past: Sequence[ir.Value]) -> tuple[int, int, int, int]:
    """(heads, kv_heads, head_dim, capacity). Raises ValueError where they are not known, or not the op's."""
    query, key, value = (() if v.shape is None else tuple(v.shape) for v in (core.query, *past))
    if (
        len(key) != 4
        or len(value) != 4
        or len(query) != 4
        or not all(isinstance(n, int) for n in (*key[1:], *query[1::2]))
    ):
        raise ValueError("the sizes of its caches and queries are not all known")
    if key[1:] != value[1:]:
        raise ValueError(f"keys have {key[3]} dimensions and values {value[3]}; CachedAttention has one head size")
    heads, (kv_heads, capacity, head_dim) = query[1], key[1:]
    assert isinstance(heads, int)
    assert isinstance(kv_heads, int)
    assert isinstance(capacity, int)
    assert isinstance(head_dim, int)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"its heads have {head_dim} dimensions; CachedAttention has at most {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} heads of keys do not divide {heads} of queries")
    for scatter in (core.key, core.value):
        if (
            scatter.attributes.get_int("axis", -2) not in (-2, 2)
            or scatter.attributes.get_string("mode", "linear") != "linear"
        ):
            raise ValueError(f"node '{scatter.name}' does not append along the capacity")
    if len({v.dtype for v in (core.query, *past)}) != 1:
        raise ValueError("its caches have another type than its queries")
    return heads, kv_heads, head_dim, capacity


def _with_norm(source: Projection, head_dim: int) -> Projection:
    # A norm of each head, not of all heads together.
    norm = None if source.layout == Layout.FLAT else match_rms_norm(source.value, head_dim)
    if norm is None or norm.x.dtype != source.value.dtype:
        return source
    found = in_front_of_layout(norm.x, source.heads, head_dim)
    return source if found is None else replace(found, norm=norm)


def _flat(result: ir.Value, width: int) -> tuple[ir.Value, Layout]:
    """[batch, new, heads * head_dim] behind Transpose and Reshape, where these follow."""
    users = result.consumers()
    if len(users) == 1 and is_op(users[0], "Transpose") and ints_attribute(users[0], "perm") == [0, 2, 1, 3]:
        by_token = users[0].outputs[0]
        behind = by_token.consumers()
        if len(behind) == 1 and is_op(behind[0], "Reshape"):
            flat = behind[0].outputs[0]
            if flat.shape is not None and len(flat.shape) == 3 and flat.shape[2] == width:
                return flat, Layout.FLAT
    return result, Layout.HEADS_FIRST


def _equal(a: Rotation, b: Rotation) -> bool:
    return a is b or (a.kind == b.kind and np.array_equal(a.cos, b.cos) and np.array_equal(a.sin, b.sin))


def _numbers(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    return tensor.dtype, *tensor.shape.numpy(), hashlib.sha256(tensor.tobytes()).digest()


def _attribute(attribute: ir.Attr) -> object:
    """Equal for attributes of equal content; a graph equals only itself."""
    if attribute.type == ir.AttributeType.TENSOR:
        return _numbers(attribute.as_tensor())
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return attribute
    return str(attribute.value)
