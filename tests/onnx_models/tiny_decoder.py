"""A tiny decoder with caches, made by hand in ONNX, and the same in Torch without a cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from trt_nvfp4.builder.model.decoder_contract import DECODER, LOGIT_TOKENS, Decoder

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8


class TinyDecoder:
    """One attention layer over a cache of `capacity` tokens, with learned positions; random weights. It gives out
    hidden states where `hidden`, and takes them, too, as a `head`."""

    def __init__(
        self, rng: np.random.Generator, capacity: int = 24, max_batch: int = 4, vocab: int = VOCAB,
        hidden: bool = False, head: bool = False,
    ) -> None:  # fmt: skip
        def weight(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

        self.weights = {
            "embedding": rng.standard_normal((vocab, HIDDEN)).astype(np.float32),
            "positions": rng.standard_normal((capacity + 1, HIDDEN)).astype(np.float32),
            "wq": weight(HIDDEN, HEADS * HEAD_DIM),
            "wk": weight(HIDDEN, KV_HEADS * HEAD_DIM),
            "wv": weight(HIDDEN, KV_HEADS * HEAD_DIM),
            "wo": weight(HEADS * HEAD_DIM, HIDDEN),
            "head": 3 * weight(HIDDEN, vocab),
        }
        if head:
            self.weights["previous"] = weight(HIDDEN, HIDDEN)
        self.decoder = Decoder(
            capacity=capacity,
            max_batch=max_batch,
            kv_heads=[KV_HEADS],
            head_dim=[HEAD_DIM],
            value_head_dim=[HEAD_DIM],
            vocab_size=vocab,
            eos_token_ids=[],
            cache_dtype="float32",
            logit_tokens=LOGIT_TOKENS,
            hidden_size=HIDDEN if hidden or head else 0,
            takes_hidden=head,
        )

    def save(self, path: Path, **changed: object) -> Path:
        """Write it as ONNX; `changed` fields of its metadata are not what the graph has."""
        capacity = self.decoder.capacity
        consts = {
            "zero": np.array([0], np.int64),
            "most": np.array([LOGIT_TOKENS], np.int64),
            "column": np.array([-1, 1], np.int64),
            "indices": np.arange(LOGIT_TOKENS),
            "index_axis": np.array([2], np.int64),
            "rows": np.arange(capacity, dtype=np.int64),
            "heads_q": np.array([0, 0, HEADS, HEAD_DIM], np.int64),
            "heads_kv": np.array([0, 0, KV_HEADS, HEAD_DIM], np.int64),
            "flat": np.array([0, 0, HEADS * HEAD_DIM], np.int64),
            "axis1": np.array(1, np.int64),
            "scalar0": np.array(0, np.int64),
            "last_axis": np.array([1], np.int64),
            "mask_axes": np.array([1, 3], np.int64),
            "key_axes": np.array([0, 1, 2], np.int64),
            "limit": np.array(capacity, np.int64),
        }
        n = helper.make_node
        nodes = [
            n("Shape", ["input_ids"], ["new_shape"], start=1, end=2),
            n("Squeeze", ["new_shape"], ["new"]),
            n("Range", ["scalar0", "new", "axis1"], ["offsets"]),
            n("Unsqueeze", ["past_length", "last_axis"], ["past_column"]),
            n("Add", ["past_column", "offsets"], ["position"]),
            n("Min", ["position", "limit"], ["row"]),
            n("Gather", ["embedding", "input_ids"], ["tokens"]),
            n("Gather", ["positions", "row"], ["places0"]),
            *(
                [
                    n("MatMul", ["previous_hidden_states", "previous"], ["p"]),
                    n("Add", ["tokens", "p"], ["joined"]),
                ]
                if self.decoder.takes_hidden
                else [n("Identity", ["tokens"], ["joined"])]
            ),
            n("Add", ["joined", "places0"], ["x"]),
        ]
        for part, shape in (("q", "heads_q"), ("k", "heads_kv"), ("v", "heads_kv")):
            nodes += [
                n("MatMul", ["x", f"w{part}"], [f"{part}0"]),
                n("Reshape", [f"{part}0", shape], [f"{part}1"]),
                n("Transpose", [f"{part}1"], [part], perm=[0, 2, 1, 3]),
            ]
        for name, part in (("key", "k"), ("value", "v")):
            caches = [f"past_key_values.0.{name}", part, "past_length"]
            nodes.append(n("TensorScatter", caches, [f"present.0.{name}"], axis=-2, mode="linear"))
        nodes += [
            n("Unsqueeze", ["position", "mask_axes"], ["query_at"]),
            n("Unsqueeze", ["rows", "key_axes"], ["key_at"]),
            n("LessOrEqual", ["key_at", "query_at"], ["mask"]),
            n("Attention", ["q", "present.0.key", "present.0.value", "mask"], ["a"]),
            n("Transpose", ["a"], ["a1"], perm=[0, 2, 1, 3]),
            n("Reshape", ["a1", "flat"], ["a2"]),
            n("MatMul", ["a2", "wo"], ["o"]),
            n("Add", ["x", "o"], ["y"]),
            n("Identity", ["y"], ["hidden_states"]),
            n("ConstantOfShape", ["new_shape"], ["all_zeros"], value=numpy_helper.from_array(np.zeros(1, np.int64))),
            n("Slice", ["all_zeros", "zero", "most"], ["zeros"]),
            n("Shape", ["zeros"], ["count"]),
            n("Slice", ["indices", "zero", "count"], ["some_indices"]),
            n("Add", ["zeros", "some_indices"], ["places"]),
            n("Reshape", ["new_length", "column"], ["new_column"]),
            n("Sub", ["new_column", "count"], ["begin"]),
            n("Add", ["begin", "places"], ["any"]),
            n("Max", ["any", "scalar0"], ["last"]),
            n("Unsqueeze", ["last", "index_axis"], ["last_index"]),
            n("GatherND", ["y", "last_index"], ["y_last"], batch_dims=1),
            n("MatMul", ["y_last", "head"], ["logits"]),
        ]
        cache = ["batch", KV_HEADS, capacity, HEAD_DIM]

        def info(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        names, states = ("key", "value"), ["batch", "new", HIDDEN]
        graph = helper.make_graph(
            nodes,
            "decoder",
            [
                info("input_ids", TensorProto.INT64, ["batch", "new"]),
                *(info(name, TensorProto.INT64, ["batch"]) for name in ("past_length", "new_length")),
                *(info(f"past_key_values.0.{name}", TensorProto.FLOAT, cache) for name in names),
                *([info("previous_hidden_states", TensorProto.FLOAT, states)] if self.decoder.takes_hidden else []),
            ],
            [
                info("logits", TensorProto.FLOAT, ["batch", "last", self.decoder.vocab_size]),
                *(info(f"present.0.{name}", TensorProto.FLOAT, cache) for name in names),
                *([info("hidden_states", TensorProto.FLOAT, states)] if self.decoder.hidden_size else []),
            ],
            [numpy_helper.from_array(value, name) for name, value in (self.weights | consts).items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        entry = model.metadata_props.add()
        entry.key, entry.value = DECODER, replace(self.decoder, **changed).json()  # type: ignore[arg-type]
        onnx.save(model, path)
        return path

    def logits(self, ids: list[int]) -> np.ndarray:
        """[tokens, vocab] by Torch's causal attention, all tokens at once."""
        return self.hidden(ids) @ self.weights["head"]

    def hidden(self, ids: list[int], previous: np.ndarray | None = None) -> np.ndarray:
        """[tokens, HIDDEN]; `previous`, of the same shape, is what a head takes."""
        w = {name: torch.from_numpy(value) for name, value in self.weights.items()}
        x = w["embedding"][ids] + w["positions"][: len(ids)]
        if previous is not None:
            x = x + torch.from_numpy(previous) @ w["previous"]
        q = (x @ w["wq"]).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
        k, v = ((x @ w[name]).view(-1, KV_HEADS, HEAD_DIM).transpose(0, 1) for name in ("wk", "wv"))
        a = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        return (x + a.transpose(0, 1).reshape(len(ids), -1) @ w["wo"]).numpy()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The next tokens, each from the whole text before it."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(prompt) :]
