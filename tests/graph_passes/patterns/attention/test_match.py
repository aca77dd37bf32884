"""Attention over caches: what is found in graphs that are written by hand, and what is refused with which reason."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose
from trt_nvfp4.graph_passes.mixed_precision.convert import convert
from trt_nvfp4.graph_passes.patterns.attention.match import UnsupportedAttention, match_attentions
from trt_nvfp4.graph_passes.subgraphs.attention import CacheAttention
from trt_nvfp4.plugins.ops.cached_attention import ROPE_HALVES, ROPE_INTERLEAVED, ROPE_NONE

Load = Callable[[onnx.ModelProto], SourceModel]
Tensors = dict[str, np.ndarray]
HEADS, KV_HEADS, DIM, CAPACITY, WIDTH = 4, 2, 8, 24, 16


@dataclass
class Decoder:
    """One layer of attention over caches; each part may be spelled in another way."""

    interleaved: int = 0
    rotary: int = DIM  # 0: none
    window: int = 0
    slopes: bool = False  # of ALiBi
    value_dim: int = DIM
    normed: bool = False
    narrow_values: bool = False  # projected in float16, cached in float32
    read_keys_again: bool = False
    tables: Tensors = field(default_factory=dict)

    def model(self, rng: np.random.Generator) -> onnx.ModelProto:
        half = max(self.rotary // 2, 1)
        angles = rng.uniform(0, 6, (CAPACITY, half)).astype(np.float32)
        self.tables = {"cos": 1.25 * np.cos(angles), "sin": 1.25 * np.sin(angles)}
        constants: Tensors = {
            **self.tables,
            **{
                f"w{part}": rng.standard_normal((WIDTH, heads * dim)).astype(np.float32)
                for part, heads, dim in (("q", HEADS, DIM), ("k", KV_HEADS, DIM), ("v", KV_HEADS, self.value_dim))
            },
            "zero": np.array(0),
            "one": np.array(1),
            "column": np.array([1]),
            "ends": np.array([1, 3]),
            "keys_at": np.arange(CAPACITY).reshape(1, 1, 1, -1),
            "window": np.array(self.window),
            "slope": -rng.uniform(0.1, 1, (1, HEADS, 1, 1)).astype(np.float32),
            "low": np.array(-3e38, np.float32),
            "none": np.array(0, np.float32),
            **{f"{part}_norm": rng.uniform(0.5, 1.5, DIM).astype(np.float32) for part in "qk"},
        }
        n = helper.make_node
        nodes = [
            n("Shape", ["x"], ["shape"], start=1, end=2),
            n("Squeeze", ["shape"], ["new"]),
            n("Range", ["zero", "new", "one"], ["offsets"]),
            n("Unsqueeze", ["past_length", "column"], ["past"]),
            n("Add", ["past", "offsets"], ["positions"]),
            n("Unsqueeze", ["positions", "ends"], ["queries_at"]),
            n("LessOrEqual", ["keys_at", "queries_at"], ["causal"]),
        ]
        mask = self._mask(nodes, n)
        for part, heads, dim in (("q", HEADS, DIM), ("k", KV_HEADS, DIM), ("v", KV_HEADS, self.value_dim)):
            constants[f"{part}_shape"] = np.array([0, 0, heads, dim])
            if part == "v" and self.narrow_values:
                constants["wv"] = constants["wv"].astype(np.float16)
                nodes.append(n("Cast", ["x"], ["x_narrow"], to=TensorProto.FLOAT16))
                nodes.append(n("MatMul", ["x_narrow", "wv"], ["v_narrow"]))
                nodes.append(n("Cast", ["v_narrow"], ["v_flat"], to=TensorProto.FLOAT))
            else:
                nodes.append(n("MatMul", ["x", f"w{part}"], [f"{part}_flat"], name=f"/layer/{part}/MatMul"))
            nodes += [
                n("Reshape", [f"{part}_flat", f"{part}_shape"], [f"{part}_wide"]),
                n("Transpose", [f"{part}_wide"], [f"{part}_heads"], perm=[0, 2, 1, 3]),
            ]
        rotated = ["q_heads", "k_heads"]
        if self.normed:
            for part in "qk":
                nodes.append(n("RMSNormalization", [f"{part}_heads", f"{part}_norm"], [f"{part}_normed"]))
            rotated = ["q_normed", "k_normed"]
        if self.rotary:
            before = rotated
            rotated = ["q_rotated", "k_rotated"]
            options = {"interleaved": self.interleaved, "rotary_embedding_dim": self.rotary % DIM}
            for x, y in zip(before, rotated, strict=True):
                inputs = [x, "cos", "sin", "positions"]
                nodes.append(n("RotaryEmbedding", inputs, [y], **options))
        for part, new in (("key", rotated[1]), ("value", "v_heads")):
            nodes.append(n("TensorScatter", [f"past_{part}", new, "past_length"], [f"present_{part}"], axis=-2))
        inputs = [rotated[0], "present_key", "present_value", mask]
        nodes += [
            n("Attention", inputs, ["a"], name="/layer/attention/Attention"),
            n("Transpose", ["a"], ["a_wide"], perm=[0, 2, 1, 3]),
            n("Reshape", ["a_wide", "flat_shape"], ["y"]),
        ]
        constants["flat_shape"] = np.array([0, 0, HEADS * self.value_dim])
        if self.read_keys_again:
            nodes.append(n("Identity", [rotated[1]], ["keys"]))

        def info(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        dims = {"key": DIM, "value": self.value_dim}
        caches = {name: ["batch", KV_HEADS, CAPACITY, dim] for name, dim in dims.items()}
        outputs = [info("y", TensorProto.FLOAT, ["batch", "new", HEADS * self.value_dim])]
        outputs += [info(f"present_{name}", TensorProto.FLOAT, shape) for name, shape in caches.items()]
        if self.read_keys_again:
            outputs.append(info("keys", TensorProto.FLOAT, ["batch", KV_HEADS, "new", DIM]))
        graph = helper.make_graph(
            nodes,
            "decoder",
            [
                info("x", TensorProto.FLOAT, ["batch", "new", WIDTH]),
                *(info(name, TensorProto.INT64, ["batch"]) for name in ("past_length", "new_length")),
                *(info(f"past_{name}", TensorProto.FLOAT, shape) for name, shape in caches.items()),
            ],
            outputs,
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)

    def _mask(self, nodes: list[onnx.NodeProto], n: Callable[..., onnx.NodeProto]) -> str:
        if self.slopes:
            nodes += [
                n("Sub", ["queries_at", "keys_at"], ["distance"]),
                n("Cast", ["distance"], ["distance_f"], to=TensorProto.FLOAT),
                n("Mul", ["distance_f", "slope"], ["bias"]),
                n("Where", ["causal", "bias", "low"], ["additive"]),
            ]
            return "additive"
        if self.window:
            nodes += [
                n("Sub", ["queries_at", "window"], ["oldest"]),
                n("Greater", ["keys_at", "oldest"], ["near"]),
                n("And", ["causal", "near"], ["windowed"]),
            ]
            return "windowed"
        return "causal"


def matched(loaded: Load, decoder: Decoder, seed: int) -> CacheAttention | UnsupportedAttention:
    (found,) = match_attentions(loaded(decoder.model(np.random.default_rng(seed))).ir_model)
    return found


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (Decoder(rotary=0), ROPE_NONE),
        (Decoder(), ROPE_HALVES),
        (Decoder(rotary=4), ROPE_HALVES),
        (Decoder(interleaved=1), ROPE_INTERLEAVED),
        (Decoder(interleaved=1, rotary=6), ROPE_INTERLEAVED),
    ],
    ids=["none", "halves", "partial", "interleaved", "partial_interleaved"],
)
def test_rotary_tables_are_read_off_values(loaded: Load, decoder: Decoder, kind: int, seed: int) -> None:
    found = matched(loaded, decoder, seed)
    assert isinstance(found, CacheAttention), found
    assert (found.rotation.kind, found.window, found.scale) == (kind, 0, pytest.approx(DIM**-0.5))
    if kind != ROPE_NONE:
        np.testing.assert_allclose(found.rotation.cos, decoder.tables["cos"], atol=1e-6)
        np.testing.assert_allclose(found.rotation.sin, decoder.tables["sin"], atol=1e-6)
    assert [part.value.name for part in (found.query, found.key, found.value)] == ["q_flat", "k_flat", "v_flat"]


def test_a_window_is_counted(loaded: Load, seed: int) -> None:
    found = matched(loaded, Decoder(window=5), seed)
    assert isinstance(found, CacheAttention), found
    assert found.window == 5


def test_tables_and_positions_may_lie_in_a_file_of_their_own(tmp_path: Path, seed: int) -> None:
    """As of every model that is too large for one file."""
    decoder = Decoder()
    model = decoder.model(np.random.default_rng(seed))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=100)
    (found,) = match_attentions(load(tmp_path / "model.onnx").ir_model)
    assert isinstance(found, CacheAttention), found
    np.testing.assert_allclose(found.rotation.cos, decoder.tables["cos"], atol=1e-6)


def test_norms_are_found_behind_weights_that_were_rounded(loaded: Load, seed: int) -> None:
    model = loaded(Decoder(normed=True).model(np.random.default_rng(seed)))
    (found,) = match_attentions(convert(model, choose(model, "bf16")).ir_model)
    assert isinstance(found, CacheAttention), found
    assert found.norms is not None
    assert found.past[0].dtype == ir.DataType.BFLOAT16


def test_what_one_op_takes_has_one_type(loaded: Load, seed: int) -> None:
    """Values projected in float16 are taken behind their Cast."""
    found = matched(loaded, Decoder(narrow_values=True), seed)
    assert isinstance(found, CacheAttention)
    assert {part.value.dtype for part in (found.query, found.key, found.value)} == {ir.DataType.FLOAT}
    assert found.value.value.name == "v_flat"


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (Decoder(slopes=True), "adds to scores that count"),
        (Decoder(value_dim=4), "keys have 8 dimensions and values 4"),
        (Decoder(read_keys_again=True), "also read by node|also an output"),
    ],
    ids=["alibi", "value_size", "keys_elsewhere"],
)
def test_refused_with_the_reason(loaded: Load, decoder: Decoder, reason: str, seed: int) -> None:
    found = matched(loaded, decoder, seed)
    assert isinstance(found, UnsupportedAttention)
    assert re.search(reason, found.reason)


def test_models_without_caches_have_none(loaded: Load) -> None:
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
    )
    assert match_attentions(loaded(helper.make_model(graph)).ir_model) == []
