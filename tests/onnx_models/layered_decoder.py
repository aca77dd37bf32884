"""A decoder of several equal layers, made by hand in ONNX: RMSNorm, rotary attention over caches, gated MLP."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.builder.model.decoder_contract import DECODER, Decoder

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, HIDDEN = 64, 64, 4, 2, 16, 96


@dataclass
class LayeredDecoder:
    """What a layer may have that the others have not is named by its number."""

    layers: int = 3
    capacity: int = 24
    max_batch: int = 2
    #: Layers with another epsilon in their second norm, without the second residual, or whose output is the model's.
    odd_epsilon: tuple[int, ...] = ()
    no_residual: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    #: Layers with rotary tables of their own, as local and global ones have.
    own_tables: tuple[int, ...] = ()
    #: In place of the MLPs, so many experts of which two are chosen; layers with a bias of their router.
    experts: int = 0
    biased: tuple[int, ...] = ()

    def save(self, path: Path, rng: np.random.Generator) -> Path:
        n = helper.make_node
        constants: dict[str, np.ndarray] = {
            "zero": np.array(0),
            "one": np.array(1),
            "axis": np.array([1]),
            "ends": np.array([1, 3]),
            "keys_at": np.arange(self.capacity).reshape(1, 1, 1, -1),
            "limit": np.array(self.capacity - 1),
            "flat": np.array([0, 0, HEADS * DIM]),
            "rows_of": np.array([-1, WIDTH]),
            "two": np.array([2]),
            "last_axis": np.array([-1]),
            "no_weight": np.array(0, np.float32),
            "wide_q": np.array([0, 0, HEADS, DIM]),
            "wide_kv": np.array([0, 0, KV_HEADS, DIM]),
            "embedding": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
            "final": rng.uniform(0.5, 1.5, WIDTH).astype(np.float32),
            "head": (rng.standard_normal((WIDTH, VOCAB)) / 4).astype(np.float32),
        }
        for own in ("", *self.own_tables):
            angles = rng.uniform(0, 6, (self.capacity, DIM // 2)).astype(np.float32)
            constants |= {f"cos{own}": np.cos(angles), f"sin{own}": np.sin(angles)}
        nodes = [
            n("Shape", ["input_ids"], ["shape"], start=1, end=2),
            n("Squeeze", ["shape"], ["new"]),
            n("Range", ["zero", "new", "one"], ["offsets"]),
            n("Unsqueeze", ["past_length", "axis"], ["past"]),
            n("Add", ["past", "offsets"], ["far"]),
            n("Min", ["far", "limit"], ["positions"]),
            n("Unsqueeze", ["far", "ends"], ["queries_at"]),
            n("LessOrEqual", ["keys_at", "queries_at"], ["causal"]),
            n("Gather", ["embedding", "input_ids"], ["x0"]),
        ]
        for layer in range(self.layers):
            self._layer(layer, nodes, constants, rng)
        nodes += [
            n("RMSNormalization", [f"x{self.layers}", "final"], ["normed"], epsilon=1e-6),
            n("Sub", ["new_length", "one"], ["last"]),
            n("Unsqueeze", ["last", "axis"], ["last_column"]),
            n("GatherND", ["normed", "last_column"], ["row"], batch_dims=1),
            n("Unsqueeze", ["row", "axis"], ["rows"]),
            n("MatMul", ["rows", "head"], ["logits"], name="/head/MatMul"),
        ]
        cache = ["batch", KV_HEADS, self.capacity, DIM]
        decoder = Decoder(
            capacity=self.capacity,
            max_batch=self.max_batch,
            kv_heads=[KV_HEADS] * self.layers,
            head_dim=[DIM] * self.layers,
            value_head_dim=[DIM] * self.layers,
            vocab_size=VOCAB,
            eos_token_ids=[],
            cache_dtype="float32",
            tokenizer=None,
        )

        def info(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        graph = helper.make_graph(
            nodes,
            "decoder",
            [
                info("input_ids", TensorProto.INT64, ["batch", "new"]),
                *(info(name, TensorProto.INT64, ["batch"]) for name in ("past_length", "new_length")),
                *(info(name, TensorProto.FLOAT, cache) for name in decoder.caches),
            ],
            [
                info("logits", TensorProto.FLOAT, ["batch", 1, VOCAB]),
                *(info(name, TensorProto.FLOAT, cache) for name in decoder.presents),
                *(info(f"x{layer + 1}", TensorProto.FLOAT, ["batch", "new", WIDTH]) for layer in self.shown),
            ],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        entry = model.metadata_props.add()
        entry.key, entry.value = DECODER, decoder.json()
        onnx.save(model, path)
        return path

    def _layer(
        self, i: int, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], rng: np.random.Generator
    ) -> None:
        def add(op: str, inputs: list[str], output: str, module: str, **attributes: object) -> str:
            name = f"/layers.{i}/{module}/{op}_{len(nodes)}"
            nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
            return output

        def weight(name: str, k: int, rows: int) -> str:
            constants[f"{name}{i}"] = (rng.standard_normal((k, rows)) / np.sqrt(k)).astype(np.float32)
            return f"{name}{i}"

        def norm(name: str, x: str, epsilon: float) -> str:
            constants[f"{name}{i}"] = rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
            return add("RMSNormalization", [x, f"{name}{i}"], f"{name}_out{i}", name, epsilon=epsilon)

        tables = [f"{name}{i if i in self.own_tables else ''}" for name in ("cos", "sin")]
        x = norm("n1_", f"x{i}", 1e-6)
        rotated = {}
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            y = add("MatMul", [x, weight(f"w{part}", WIDTH, heads * DIM)], f"{part}_flat{i}", f"attn/{part}")
            y = add("Reshape", [y, "wide_q" if part == "q" else "wide_kv"], f"{part}_wide{i}", "attn")
            y = add("Transpose", [y], f"{part}_heads{i}", "attn", perm=[0, 2, 1, 3])
            if part != "v":
                y = add("RotaryEmbedding", [y, *tables, "positions"], f"{part}_turned{i}", "attn")
            rotated[part] = y
        caches = []
        for name, part in (("key", "k"), ("value", "v")):
            given = [f"past_key_values.{i}.{name}", rotated[part], "past_length"]
            caches.append(add("TensorScatter", given, f"present.{i}.{name}", "attn", axis=-2))
        y = add("Attention", [rotated["q"], *caches, "causal"], f"a{i}", "attn")
        y = add("Transpose", [y], f"a_wide{i}", "attn", perm=[0, 2, 1, 3])
        y = add("Reshape", [y, "flat"], f"a_flat{i}", "attn")
        y = add("MatMul", [y, weight("wo", HEADS * DIM, WIDTH)], f"o{i}", "attn/o")
        middle = add("Add", [f"x{i}", y], f"middle{i}", "residual")
        x = norm("n2_", middle, 1e-3 if i in self.odd_epsilon else 1e-6)

        def mlp(x: str, of: str) -> str:
            gate = add("MatMul", [x, weight(f"wg{of}", WIDTH, HIDDEN)], f"gate{of}{i}", f"mlp{of}/gate")
            up = add("MatMul", [x, weight(f"wu{of}", WIDTH, HIDDEN)], f"up{of}{i}", f"mlp{of}/up")
            half = add("Sigmoid", [gate], f"sigmoid{of}{i}", f"mlp{of}")
            half = add("Mul", [gate, half], f"silu{of}{i}", f"mlp{of}")
            half = add("Mul", [half, up], f"hidden{of}{i}", f"mlp{of}")
            return add("MatMul", [half, weight(f"wd{of}", HIDDEN, WIDTH)], f"down{of}{i}", f"mlp{of}/down")

        def mixture(x: str) -> str:
            """Of flat rows: softmax, two experts, weights that sum to one."""
            rows = add("Reshape", [x, "rows_of"], f"rows{i}", "moe")
            logits = add("MatMul", [rows, weight("wr", WIDTH, self.experts)], f"logits{i}", "moe/router")
            if i in self.biased:
                constants[f"br{i}"] = rng.standard_normal(self.experts).astype(np.float32)
                logits = add("Add", [logits, f"br{i}"], f"biased{i}", "moe/router")
            scores = add("Softmax", [logits], f"scores{i}", "moe", axis=-1)
            name = f"/layers.{i}/moe/TopK_{len(nodes)}"
            nodes.append(helper.make_node("TopK", [scores, "two"], [f"best{i}", f"chosen{i}"], name=name, axis=-1))
            total = add("ReduceSum", [f"best{i}", "last_axis"], f"total{i}", "moe", keepdims=1)
            weights = add("Div", [f"best{i}", total], f"weights{i}", "moe")
            y = ""
            for expert in range(self.experts):
                constants[f"expert{expert}"] = np.array(expert)
                own = add("Equal", [f"chosen{i}", f"expert{expert}"], f"own{expert}_{i}", "moe")
                own = add("Where", [own, weights, "no_weight"], f"share{expert}_{i}", "moe")
                own = add("ReduceSum", [own, "last_axis"], f"factor{expert}_{i}", "moe", keepdims=1)
                part = add("Mul", [mlp(rows, f"_e{expert}_"), own], f"part{expert}_{i}", "moe")
                y = add("Add", [y, part], f"sum{expert}_{i}", "moe") if y else part
            shape = add("Shape", [x], f"shape{i}", "moe")
            return add("Reshape", [y, shape], f"moe_out{i}", "moe")

        y = mixture(x) if self.experts else mlp(x, "")
        add(
            "Identity" if i in self.no_residual else "Add",
            [y] if i in self.no_residual else [middle, y],
            f"x{i + 1}",
            "residual",
        )
