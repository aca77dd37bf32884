"""Fuzzing of `--cache inplace`: decoders with one change each are converted rightly or refused, never wrongly.

    python tests/fuzz/decoders.py --count 1000 --seed 7 --keep failures/

prints how many variants of exported decoders ended how, and the numbers of those converted wrongly; variant N of a seed
is always the same one.
"""

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1]))
from onnx_models import exported_decoders
from onnx_models.exported_decoders import VOCAB
from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export.onnx_decoders import convert_decoder
from trt_nvfp4.common.onnx_runtime import onnxruntime

CAPACITY, LIMIT = 40, 2e-3
INVALID, REFUSED, RIGHT, WRONG = "does not run", "refused", "converted", "converted wrongly"
# Operators that take each other's place.
_ALIKE = (
    ("Add", "Sub", "Mul", "Div", "Max", "Min"),
    ("LessOrEqual", "Less", "Greater", "GreaterOrEqual"),
    ("And", "Or", "Xor"),
    ("Sin", "Cos"),
    ("Sigmoid", "Tanh", "Softplus", "Erf", "Neg", "Relu"),
    ("ReduceMean", "ReduceSum", "ReduceMax"),
)
# What is put behind a value of floats: operator, constant (an operand of it, or None), attributes.
_BEHIND: tuple[tuple[str, object, dict[str, int]], ...] = (
    ("Neg", None, {}),
    ("Mul", 0.5, {}),
    ("Add", 0.25, {}),
    ("Max", 0.0, {}),
    ("CumSum", np.array(1), {}),
    ("CumSum", np.array(-1), {}),
    ("Softmax", None, {"axis": -1}),
    ("Softmax", None, {"axis": 1}),
    ("ReduceMax", np.array([1]), {"keepdims": 1}),
    ("ReduceMean", np.array([-2]), {"keepdims": 1}),
)
_BEHIND_INTEGERS = (("Min", 16), ("Mod", 16), ("Mod", 7), ("Div", 2), ("Add", 1), ("Sub", 1), ("Max", 5), ("Mul", 2))


def variant(seed: int, number: int) -> tuple[str, onnx.ModelProto]:
    """(what was changed, variant `number` of `seed`)."""
    random_ = random.Random(f"{seed} {number}")
    name = random_.choice(exported_decoders.NAMES)
    model = onnx.shape_inference.infer_shapes(
        exported_decoders.model(name, np.random.default_rng(random_.randrange(1000)))
    )
    while True:
        change = random_.choice((_operator, _operands, _attribute, _constant, _behind, _behind, _rewired, _left_out))
        if (what := change(model, random_)) is not None:
            del model.graph.value_info[:]
            return f"{name}: {what}", model


def _operator(model: onnx.ModelProto, random_: random.Random) -> str | None:
    node = random_.choice(model.graph.node)
    group = next((group for group in _ALIKE if node.op_type in group), None)
    if group is None:
        return None
    before, node.op_type = node.op_type, random_.choice([name for name in group if name != node.op_type])
    return f"{node.name} {before} became {node.op_type}"


def _operands(model: onnx.ModelProto, random_: random.Random) -> str | None:
    node = random_.choice([node for node in model.graph.node if len(node.input) > 1])
    one, other = random_.sample(range(len(node.input)), 2)
    if node.op_type in ("Add", "Mul", "And"):
        return None
    node.input[one], node.input[other] = node.input[other], node.input[one]
    return f"{node.name} {node.op_type} operands {one} and {other} swapped"


def _attribute(model: onnx.ModelProto, random_: random.Random) -> str | None:
    node = random_.choice(model.graph.node)
    changeable = [entry for entry in node.attribute if entry.type in (1, 2, 7)]  # a float, an integer, integers
    if not changeable:
        return None
    entry = random_.choice(changeable)
    before = helper.get_attribute_value(entry)
    if entry.type == onnx.AttributeProto.FLOAT:
        entry.f = random_.choice((0.0, -entry.f, 2 * entry.f, entry.f + 0.1))
    elif entry.type == onnx.AttributeProto.INT:
        entry.i = random_.choice((0, 1, 2, 3, -1, -2, 5))
    else:
        random_.shuffle(entry.ints)
    after = helper.get_attribute_value(entry)
    return None if after == before else f"{node.name} {node.op_type} {entry.name} {before} became {after}"


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    of_nodes = [entry.t for node in model.graph.node if node.op_type == "Constant" for entry in node.attribute]
    return [tensor for tensor in (*model.graph.initializer, *of_nodes) if tensor.data_type in (1, 6, 7)]


def _constant(model: onnx.ModelProto, random_: random.Random) -> str | None:
    tensor = random_.choice([tensor for tensor in _tensors(model) if np.prod(tensor.dims) <= 64])
    array = numpy_helper.to_array(tensor).copy()
    if not array.size:
        return None
    flat = array.reshape(-1)
    at, before = random_.randrange(flat.size), array.copy()
    flat[at] = random_.choice((0, 1, 2, -1, 16, 7, flat[at] + 1, flat[at] - 1, flat[at] * 2, -flat[at]))
    if np.array_equal(before, array):
        return None
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"constant {tensor.name} [{at}] {before.reshape(-1)[at]} became {flat[at]}"


def _behind(model: onnx.ModelProto, random_: random.Random) -> str | None:
    kinds = _kinds(model)
    names = [name for node in model.graph.node for name in node.output if kinds.get(name) in (1, 7)]
    names += [value.name for value in model.graph.input if value.name == "position_ids"] * 8
    name = random_.choice(names or ["input_ids"])
    users = [node for node in model.graph.node if name in node.input]
    if not users:
        return None
    operands, attributes = [name], {}
    if kinds[name] == onnx.TensorProto.FLOAT:
        op, operand, attributes = random_.choice(_BEHIND)
        number = (
            None if operand is None else np.asarray(operand, None if isinstance(operand, np.ndarray) else np.float32)
        )
    else:
        op, integer = random_.choice(_BEHIND_INTEGERS)
        number = np.array(integer)
    if number is not None:
        model.graph.initializer.append(numpy_helper.from_array(number, "fuzz/constant"))
        operands.append("fuzz/constant")
    chosen = users if random_.random() < 0.5 else [random_.choice(users)]
    for node in chosen:
        node.input[:] = ["fuzz/value" if given == name else given for given in node.input]
    made = helper.make_node(op, operands, ["fuzz/value"], "fuzz/node", **attributes)
    places = [index for index, node in enumerate(model.graph.node) if name in node.output]
    model.graph.node.insert(places[0] + 1 if places else 0, made)
    return f"{op} {'' if number is None else number} {attributes} behind {name}, for {len(chosen)} of {len(users)}"


def _rewired(model: onnx.ModelProto, random_: random.Random) -> str | None:
    kinds = _kinds(model)
    index = random_.randrange(len(model.graph.node))
    node = model.graph.node[index]
    at = random_.randrange(len(node.input)) if node.input else 0
    if not node.input or not node.input[at]:
        return None
    shapes = {value.name: _shape(value) for value in (*model.graph.value_info, *model.graph.input)}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    name = node.input[at]
    before = {value.name for value in model.graph.input} | {t.name for t in model.graph.initializer}
    before |= {output for other in model.graph.node[:index] for output in other.output}
    alike = [
        o for o in sorted(before) if o != name and kinds.get(o) == kinds.get(name) and shapes.get(o) == shapes.get(name)
    ]
    if not alike or kinds.get(name) is None:
        return None
    node.input[at] = random_.choice(alike)
    return f"{node.name} {node.op_type} reads {node.input[at]} in place of {name}"


def _left_out(model: onnx.ModelProto, random_: random.Random) -> str | None:
    node = random_.choice([node for node in model.graph.node if node.input and node.input[0]])
    if len(node.output) != 1 or any(value.name == node.output[0] for value in model.graph.output):
        return None
    for other in model.graph.node:
        other.input[:] = [node.input[0] if name == node.output[0] else name for name in other.input]
    return f"{node.name} {node.op_type} left out"


def _kinds(model: onnx.ModelProto) -> dict[str, int]:
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.input)}
    return kinds | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def _shape(value: onnx.ValueInfoProto) -> tuple[object, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def outcome(model: onnx.ModelProto, folder: Path, seed: int) -> tuple[str, str]:
    """(how the conversion of `model` ends, details). Two texts of unequal length, in pieces of random sizes, up to the
    caches' capacity."""
    random_ = random.Random(seed)
    path, converted = folder / "m.onnx", folder / "c.onnx"
    onnx.save(model, path)
    ids = np.random.default_rng(seed).integers(0, VOCAB, (2, CAPACITY))
    pieces: list[tuple[int, int]] = [(random_.randint(2, 12), random_.randint(1, 6))]
    while max(map(sum, zip(*pieces, strict=True))) < CAPACITY - 12:
        pieces.append((random_.choice((1, 1, 2, 9)), random_.choice((1, 1, 3))))
    try:
        expected = [_growing(path, ids[row], [piece[row] for piece in pieces]) for row in (0, 1)]
    except Exception as error:  # ONNX Runtime's own error types
        return INVALID, str(error)
    if not all(np.isfinite(logits).all() for logits in expected):
        return INVALID, "its logits are not finite"
    converted.unlink(missing_ok=True)
    try:
        convert_decoder(path, converted, CAPACITY)
    except BuilderError as error:
        return REFUSED, str(error)
    found = _in_place(converted, ids, pieces)
    worst = max(
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for row in (0, 1)
        for a, b in zip(found[row], expected[row], strict=True)
    )
    return (RIGHT if worst <= LIMIT else WRONG), f"error {worst:.2g}"


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _growing(path: Path, ids: np.ndarray, pieces: list[int]) -> list[np.ndarray]:
    """The logits of the last token of each piece, over caches that grow."""
    session, past, logits = _session(path), 0, []
    inputs, outputs = session.get_inputs(), [entry.name for entry in session.get_outputs()]
    caches = {
        entry.name: np.zeros(
            (1, entry.shape[1], 0, entry.shape[3] if isinstance(entry.shape[3], int) else 16), np.float32
        )
        for entry in inputs
        if entry.name.startswith("past_key")
    }
    for new in pieces:
        feeds = {
            "input_ids": ids[None, past : past + new],
            "attention_mask": np.ones((1, past + new), np.int64),
            "position_ids": np.arange(past, past + new)[None],
            **caches,
        }
        results = session.run(outputs, {entry.name: feeds[entry.name] for entry in inputs})
        found = dict(zip(outputs, results, strict=True))
        caches = {name: found[name.replace("past_key_values", "present")] for name in caches}
        logits.append(found["logits"][0, -1])
        past += new
    return logits


def _in_place(path: Path, ids: np.ndarray, pieces: list[tuple[int, int]]) -> list[list[np.ndarray]]:
    """The same of both texts in one batch, over caches updated in place."""
    session, past = _session(path), np.zeros(2, np.int64)
    outputs = [entry.name for entry in session.get_outputs()]
    caches = {
        entry.name: np.zeros((2, *entry.shape[1:]), np.float32)
        for entry in session.get_inputs()
        if entry.name.startswith("past_key")
    }
    logits: list[list[np.ndarray]] = [[], []]
    for piece in pieces:
        new = np.array(piece)
        window = np.zeros((2, max(piece)), np.int64)
        for row in (0, 1):
            window[row, : new[row]] = ids[row, past[row] : past[row] + new[row]]
        feeds = {"input_ids": window, "past_length": past, "new_length": new, **caches}
        found = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        caches = {name: found[name.replace("past_key_values", "present")] for name in caches}
        for row in (0, 1):
            logits[row].append(found["logits"][row, -1])
        past = past + new
    return logits


def run(seed: int, count: int, report: Callable[[int, str, str, str], None] = lambda *_: None) -> Counter[str]:
    """How many of the first `count` variants of `seed` ended how; `report` is called with each one's number, change,
    ending and details."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            change, model = variant(seed, number)
            how, details = outcome(model, Path(folder), number)
            counts[how] += 1
            if number % 20 == 19:
                print(number + 1, dict(counts), file=sys.stderr, flush=True)
            report(number, change, how, details)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the variants that were converted wrongly")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    def report(number: int, change: str, how: str, details: str) -> None:
        if how == WRONG:
            print(number, change, details, flush=True)
            if arguments.keep is not None:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                onnx.save(variant(arguments.seed, number)[1], arguments.keep / f"{number}.onnx")

    counts = run(arguments.seed, arguments.count, report)
    print(", ".join(f"{how}: {number}" for how, number in counts.most_common()))
    sys.exit(bool(counts[WRONG]))


if __name__ == "__main__":
    main()
