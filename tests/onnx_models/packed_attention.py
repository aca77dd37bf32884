"""Attention blocks whose queries, keys and values come from one linear, in the spellings of exporters."""

import numpy as np
import onnx
from onnx import numpy_helper, parser

# How the product `p` [batch, tokens, 3 * K] becomes q, k and v [batch, heads, tokens, K / heads].
_BY_AXIS = "r = Reshape(p, five)  t = Transpose<perm = [2, 0, 3, 1, 4]>(r)"
_SPLIT = "q3, k3, v3 = Split<axis = 2, num_outputs = 3>({})" + "".join(
    f"  {name}4 = Reshape({name}3, four)  {name} = Transpose<perm = [0, 2, 1, 3]>({name}4)" for name in "qkv"
)
UNPACKED = {
    "slice": _BY_AXIS
    + "".join(
        f"  {name}5 = Slice(t, i{place}, i{place + 1}, i0)  {name} = Squeeze({name}5, i0)"
        for place, name in enumerate("qkv")
    ),
    "gather": _BY_AXIS + "".join(f"  {name} = Gather<axis = 0>(t, s{place})" for place, name in enumerate("qkv")),
    "split": _SPLIT.format("p"),
}
PRODUCTS = {
    "bias": "[qkv] m = MatMul(x, w)  p = Add(m, b)",
    "no bias": "[qkv] p = MatMul(x, w)",
    "gemm": "f = Reshape(x, rows)  [qkv] g = Gemm<transB = 1>(f, wt, b)  p = Reshape(g, three)",
}


def packed_attention(product: str, unpacked: str, k: int, heads: int, seed: int) -> onnx.ModelProto:
    """y = attention of x [2, tokens, k]; weights and biases are drawn anew."""
    rng = np.random.default_rng(seed)
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        packed (float[2, tokens, {k}] x) => (float[2, tokens, {k}] y) {{
            {PRODUCTS[product]}
            {UNPACKED[unpacked]}
            kt = Transpose<perm = [0, 1, 3, 2]>(k)
            s = MatMul(q, kt)
            a = Softmax(s)
            o = MatMul(a, v)
            ot = Transpose<perm = [0, 2, 1, 3]>(o)
            h = Reshape(ot, back)
            [out] y = MatMul(h, wo)
        }}""")
    weight = rng.standard_normal((k, 3 * k)) / np.sqrt(k) * np.exp(rng.standard_normal(3 * k))
    constants: dict[str, np.ndarray] = {
        "w": weight.astype(np.float32),
        "wt": weight.T.astype(np.float32),
        "b": rng.standard_normal(3 * k).astype(np.float32),
        "wo": (rng.standard_normal((k, k)) / np.sqrt(k)).astype(np.float32),
        "five": np.array([0, -1, 3, heads, k // heads]),
        "four": np.array([0, -1, heads, k // heads]),
        "three": np.array([2, -1, 3 * k]),
        "rows": np.array([-1, k]),
        "back": np.array([0, -1, k]),
        **{f"i{place}": np.array([place]) for place in range(4)},
        **{f"s{place}": np.array(place) for place in range(3)},
    }
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items() if name in used)
    return model
