"""Writes a stack of gated MLPs as ONNX with external data, one weight in memory at a time.

The defaults give the reference stack: 18 layers, hidden 2048, intermediate 16384, GELU-tanh gate, 3.6 GB of BF16.

    python examples/make_mlp_stack.py stack.onnx [--layers 18] [--hidden 2048] [--intermediate 16384]
        [--dtype bfloat16] [--bare]
"""

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir import tape


def make_mlp_stack(
    path: Path,
    layers: int = 18,
    hidden: int = 2048,
    intermediate: int = 16384,
    dtype: str = "bfloat16",
    bare: bool = False,
    seed: int = 0,
) -> None:
    """Writes the model to `path` and its weights to `<path>.data`.

    x and y are [batch, sequence, hidden] of `dtype`. Each layer is x + MLP(RMSNorm(x)), or MLP(x) if `bare`.
    """
    element = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}[dtype]
    x = ir.val("x", dtype=element, shape=["batch", "sequence", hidden])
    graph = tape.Tape()
    initializers: list[ir.Value] = []

    def weight(name: str, rows: int, columns: int) -> ir.Value:
        number = len(initializers)

        def draw() -> ir.TensorProtocol:
            generator = np.random.default_rng((seed, number))
            values = generator.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
            return ir.Tensor(values.astype(element.numpy()), dtype=element, name=name)

        return _initializer(name, ir.LazyTensor(draw, dtype=element, shape=ir.Shape((rows, columns)), name=name))

    def constant(name: str, value: np.ndarray) -> ir.Value:
        return _initializer(name, ir.tensor(value.astype(element.numpy()), name=name))

    def _initializer(name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        initializers.append(value)
        return value

    epsilon = constant("epsilon", np.array(1e-6, np.float32))
    axes = _initializer("axes", ir.tensor(np.array([-1]), name="axes"))
    current = x
    for layer in range(layers):
        inner = current
        if not bare:
            mean = graph.op("ReduceMean", [graph.op("Mul", [current, current]), axes], {"keepdims": 1})
            root = graph.op("Sqrt", [graph.op("Add", [mean, epsilon])])
            inner = graph.op("Mul", [graph.op("Div", [current, root]), constant(f"norm.{layer}", np.ones(hidden))])
        gate = graph.op("MatMul", [inner, weight(f"layers.{layer}.gate", hidden, intermediate)])
        up = graph.op("MatMul", [inner, weight(f"layers.{layer}.up", hidden, intermediate)])
        product = graph.op("Mul", [graph.op("Gelu", [gate], {"approximate": "tanh"}), up])
        down = graph.op("MatMul", [product, weight(f"layers.{layer}.down", intermediate, hidden)])
        current = down if bare else graph.op("Add", [current, down])
    current.name, current.type, current.shape = "y", ir.TensorType(element), x.shape
    model = ir.Model(
        ir.Graph(
            [x], [current], nodes=graph.nodes, initializers=initializers, opset_imports={"": 20}, name="mlp_stack"
        ),
        ir_version=10,
    )
    ir.save(model, path, external_data=f"{path.name}.data")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=16384)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--bare", action="store_true", help="no RMSNorm and no residual")
    make_mlp_stack(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
