"""Small models that mutations start from: what the passes look for, in spellings that take many of their branches."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from onnx_models.tiny_decoder import TinyDecoder

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
PLAIN = """
g (float[batch, 32] x) => (float[batch, 32] y) {
    [cast] c = Cast<to = 1>(x)
    [scale] half = Constant<value = float {0.5}>()
    [up] a = MatMul(c, w1)
    [bias] b = Add(a, b1)
    [act] h = Relu(b)
    [down] d = Gemm<transB = 1, alpha = 1.0>(h, w2t, b2)
    [halve] e = Mul(d, half)
    [shape] s = Shape(e)
    [same] r = Reshape(e, s)
    [residual] y = Add(r, x)
}
"""
GATED = """
g (float16[batch, tokens, 32] x) => (float16[batch, tokens, 32] y) {
    [wide] f = Cast<to = 1>(x)
    two = Constant<value = float {2.0}>()
    [square] q = Pow(f, two)
    axes = Constant<value_ints = [-1]>()
    [mean] m = ReduceMean<keepdims = 1>(q, axes)
    tiny = Constant<value = float {0.00001}>()
    [plus] p = Add(m, tiny)
    [root] t = Sqrt(p)
    [norm] n = Div(f, t)
    [narrow] i = Cast<to = 10>(n)
    [scaled] k = Mul(i, norm_w)
    wg = Gather<axis = 0>(stack, zero)
    wu = Gather<axis = 0>(stack, one)
    [gate] g1 = MatMul(k, wg)
    [sigmoid] g2 = Sigmoid(g1)
    [silu] g3 = Mul(g1, g2)
    [up] u = MatMul(k, wu)
    [gated] h = Mul(g3, u)
    wdt = Transpose<perm = [1, 0]>(wd)
    [down] d = MatMul(h, wdt)
    [residual] y = Add(d, x)
}
"""
NESTED = """
g (float[4, 32] x, bool[] c) => (float[4, 32] y, float[4, 64] z) {
    [split] a, b = Split<axis = 1, num_outputs = 2>(w)
    [up] u = Einsum<equation = "bk,kn->bn">(x, a)
    [twice] t = of.mine.Twice(u)
    [down] d = MatMul(t, w2)
    [choose] y = If (c) <then_branch = yes () => (float[4, 32] e) { e = Relu(d) },
                         else_branch = no () => (float[4, 32] f) { f = Neg(d) }>
    [other] z = MatMul(x, b)
}
<domain: "of.mine", opset_import: ["": 21]>
Twice (i) => (o) { r = Relu(i)  o = Add(r, r) }
"""
# Two of three experts, each given its share of the sum.
MOE = """
g (float[batch, 32] x) => (float[batch, 32] y) {
    [router] r = MatMul(x, wr)
    [scores] p = Softmax<axis = -1>(r)
    [top] v, i = TopK<axis = -1>(p, k)
    [total] t = ReduceSum<keepdims = 1>(v, last)
    [share] n = Div(v, t)
    [shape] s = Shape(p)
    [none] z = ConstantOfShape(s)
    [spread] w = ScatterElements<axis = -1>(z, i, n)
    [split] c0, c1, c2 = Split<axis = -1, num_outputs = 3>(w)
    [up0] u0 = MatMul(x, a0)
    [act0] h0 = Relu(u0)
    [down0] d0 = MatMul(h0, b0)
    [weigh0] e0 = Mul(d0, c0)
    [up1] u1 = MatMul(x, a1)
    [act1] h1 = Relu(u1)
    [down1] d1 = MatMul(h1, b1)
    [weigh1] e1 = Mul(d1, c1)
    [up2] u2 = MatMul(x, a2)
    [act2] h2 = Relu(u2)
    [down2] d2 = MatMul(h2, b2)
    [weigh2] e2 = Mul(d2, c2)
    [sum0] s0 = Add(e0, e1)
    [sum1] y = Add(s0, e2)
}
"""


def models() -> dict[str, onnx.ModelProto]:
    """The models by name."""
    rng = np.random.default_rng(0)

    def weights(model: onnx.ModelProto, dtype: type, **shapes: tuple[int, ...]) -> onnx.ModelProto:
        for name, shape in shapes.items():
            values = (rng.standard_normal(shape) / 6).astype(dtype)
            model.graph.initializer.append(numpy_helper.from_array(values, name))
        return model

    plain = weights(parser.parse_model(HEAD + PLAIN), np.float32, w1=(32, 64), b1=(64,), w2t=(32, 64), b2=(32,))
    gated = weights(parser.parse_model(HEAD + GATED), np.float16, norm_w=(32,), stack=(2, 32, 64), wd=(32, 64))
    for number, name in enumerate(("zero", "one")):
        gated.graph.initializer.append(numpy_helper.from_array(np.array(number), name))
    head = '<ir_version: 10, opset_import: ["": 21, "of.mine": 1]>'
    nested = weights(parser.parse_model(head + NESTED), np.float32, w=(32, 128), w2=(64, 32))
    for model in (plain, gated, nested):
        model.metadata_props.add(key="note", value="of a tool")
        model.graph.node[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer', 'mlp']")
        model.graph.node[-1].metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value="['a', 'b', 'c']")
    typed = parser.parse_model(HEAD + PLAIN)
    for tensor in plain.graph.initializer:  # in the field of its type, not as bytes
        values = numpy_helper.to_array(tensor)
        typed.graph.initializer.append(onnx.helper.make_tensor(tensor.name, 1, values.shape, values.reshape(-1)))
    experts = {f"{part}{e}": shape for e in range(3) for part, shape in (("a", (32, 16)), ("b", (16, 32)))}
    moe = weights(parser.parse_model(HEAD + MOE), np.float32, wr=(32, 3), **experts)
    for name, value in (("k", [2]), ("last", [-1])):
        moe.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    with tempfile.TemporaryDirectory() as folder:
        decoder = onnx.load(TinyDecoder(rng).save(Path(folder) / "m.onnx"))
    dense = {"plain": plain, "typed": typed, "gated": gated, "nested": nested}
    return dense | {"moe": moe, "decoder": decoder}
