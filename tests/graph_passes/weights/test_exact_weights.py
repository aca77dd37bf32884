"""With weights that NVFP4 holds exactly, a rewritten model computes what the original does, or something is wrong.

Each graph has a place or two where it is no MLP as it should be: whether it is found or not, outputs and shapes agree.
"""

from collections.abc import Callable
from random import Random

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_models.graphs import ACTIVATION_SPELLINGS, Graph, Spec, run
from onnx_models.passes import rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel

Load = Callable[[onnx.ModelProto], SourceModel]
K, INTERMEDIATE = 32, 48
_LARGEST = 6 * 448 * 2.0**-12  # every matrix holds it, so that its tensor scale is a power of two

# What may stand between two steps, (op, constants, attributes); `size` is that of the last axis; 1 is a mean square's,
# which stays positive: spellings of relu differ in what they make of NaN.
BETWEEN: dict[str, Callable[[int], tuple[str, list[np.ndarray], dict[str, object]]]] = {
    "one": lambda size: ("Mul", [np.ones((), np.float32)], {}),
    "ones": lambda size: ("Mul", [np.ones(size, np.float32)], {}),
    "half": lambda size: ("Mul", [np.full(1, 0.5, np.float32)], {}),
    "dimensions": lambda size: ("Mul", [np.ones((1, 1, 1, 1), np.float32)], {}),
    "zero with dimensions": lambda size: ("Max", [np.zeros((1, 1, 1, 1), np.float32)], {}),
    "vector": lambda size: ("Mul", [np.linspace(0.5, 1, size, dtype=np.float32)], {}),
    "bias": lambda size: ("Add", [np.linspace(1, -1, size, dtype=np.float32)], {}),
    "bias with dimensions": lambda size: ("Add", [np.ones((1, 1, 1, size), np.float32)], {}),
    "dropout": lambda size: ("Dropout", [np.float32(0.5).reshape(()), np.array(False)], {}),
    "clip": lambda size: ("Clip", [np.float32(-1).reshape(()), np.float32(1).reshape(())], {}),
    "unsqueeze": lambda size: ("Unsqueeze", [np.array([-2])], {}),
    "rows": lambda size: ("Reshape", [np.array([-1, size])], {}),
    "transpose": lambda size: ("Transpose", [], {"perm": [1, 0, 2]}),
    "gather": lambda size: ("Gather", [np.arange(size)[::-1].copy()], {"axis": -1}),
    "gather with dimensions": lambda size: ("Gather", [np.arange(size)[None]], {"axis": -1}),
    "selu": lambda size: ("Selu", [], {"alpha": 0.0, "gamma": 1.0}),
    "leaky": lambda size: ("LeakyRelu", [], {"alpha": 0.001}),
    "negative": lambda size: ("Neg" if size > 1 else "Abs", [], {}),
}


def exact(generator: np.random.Generator, out: int, features: int) -> np.ndarray:
    """W [out, features]: in every 16 values of a row the largest is 6 times an E4M3 scale."""
    values = generator.choice([0.5, 1, 1.5, 2, 3, 4, 6], (out, features // 16, 16))
    values *= generator.choice([-1, 1], values.shape)
    values[..., 0] = 6
    scales = generator.choice([448, 384, 320, 256, 208], (out, features // 16, 1))
    scales[0, 0] = 448
    return (values * scales * (_LARGEST / (6 * 448))).reshape(out, features).astype(np.float32)


class Perturbed(Graph):
    """A graph that puts what is drawn between the steps that it builds."""

    def __init__(self, case: Spec, places: dict[int, str], taps: set[int]) -> None:
        super().__init__(case)
        self._places, self._taps, self.steps = places, taps, 0
        self.outputs: list[str] = []

    def step(self, value: str, size: int) -> str:
        """`value`, or what is made of it here."""
        step, self.steps = self.steps, self.steps + 1
        if step in self._places:
            op, constants, attributes = BETWEEN[self._places[step]](size)
            for index, constant in enumerate(constants):
                self.weights[f"s{step}_{index}"] = constant
            names = [f"s{step}_{index}" for index in range(len(constants))]
            value = self.op(op, [value, *names], f"s{step}", **attributes)
        if step in self._taps:
            self.outputs.append(value)
        return value

    def build(self, seed: int) -> onnx.ModelProto:
        """x -> [norm] -> MLP -> [norm] -> MLP -> y."""
        self.weights |= {"axes": np.array([-1]), "eps": np.float32(1e-5).reshape(())}
        x = "x"
        for layer in "ab":
            square = self.op("Mul", [x, x], f"{layer}_square")
            mean = self.step(self.op("ReduceMean", [square, "axes"], f"{layer}_mean"), 1)
            root = self.op("Sqrt", [self.op("Add", [mean, "eps"], f"{layer}_sum")], f"{layer}_root")
            n = self.step(self.op("Div", [x, root], f"{layer}_norm"), K)
            up = self.step(self.linear(n, f"{layer}_up", K, INTERMEDIATE, f"{layer}_u"), INTERMEDIATE)
            h = gate = self.step(self.activation(up, f"{layer}_act"), INTERMEDIATE)
            if self.spec.gated:
                other = self.step(self.linear(n, f"{layer}_other", K, INTERMEDIATE, f"{layer}_o"), INTERMEDIATE)
                h = self.step(self.op("Mul", [gate, other], f"{layer}_h"), INTERMEDIATE)
            y = self.step(self.linear(h, f"{layer}_down", INTERMEDIATE, K, f"{layer}_y"), K)
            x = self.op("Add", [x, y], f"{layer}_end") if self.spec.swapped else y
        generator = np.random.default_rng(seed)
        for ((name, stored_in_out),) in self.groups:
            rows, columns = self.weights[name].shape
            matrix = exact(generator, *((columns, rows) if stored_in_out else (rows, columns)))
            self.weights[name] = np.ascontiguousarray(matrix.T) if stored_in_out else matrix
        return self.model(list(dict.fromkeys([x, *self.outputs])))


@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_rewritten_computes_the_same(between: str, loaded: Load, seed: int) -> None:
    """At every second place, at times with something else at another place; the rest is drawn."""
    draw = Random(seed)
    for place in range(draw.randrange(2), 12, 2):
        activation = draw.choice(["relu", "relu2", "silu", "gelu", "gelu_tanh"])
        case = Spec(
            activation=activation,
            spelling=draw.choice(ACTIVATION_SPELLINGS[activation]),
            linear=draw.choice(["matmul", "transpose", "einsum"]),
            gated=draw.random() < 0.5,
            biases=draw.random() < 0.5,
            swapped=draw.random() < 0.5,
            opset=draw.choice([18, 20, 23]),
        )
        places = {draw.randrange(12): draw.choice(list(BETWEEN))} if draw.random() < 0.3 else {}
        taps = {draw.randrange(12)} if draw.random() < 0.3 else set()
        agree(Perturbed(case, places | {place: between}, taps).build(draw.randrange(2**31)), loaded, seed)


def agree(model: onnx.ModelProto, loaded: Load, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((2, 3, K)).astype(np.float32)
    try:
        expected = run(model, x)
    except Exception:  # ONNX Runtime's: some combinations are no model
        return
    for output, value in zip(model.graph.output, expected, strict=True):
        output.CopyFrom(helper.make_tensor_value_info(output.name, 1, [None] * value.ndim))
    for found, value in zip(run(rewritten(loaded(model)).path, x), expected, strict=True):
        assert found.shape == value.shape
        largest = np.abs(value[np.isfinite(value)]).max(initial=0)
        np.testing.assert_allclose(found, value, rtol=1e-3, atol=1e-4 * largest)
