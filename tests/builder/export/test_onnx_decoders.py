"""Decoders of other exporters generate, over caches updated in place, the tokens that they generate by themselves."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from command_lines import invoked

from onnx_models import exported_decoders
from onnx_models.exported_decoders import VOCAB, greedy
from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.errors import UNAVAILABLE, USAGE, ModelFaultError
from trt_nvfp4.builder.export.onnx_decoders import convert_decoder
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.graph_passes.decoders.rotary import lower_rotary

TOKENS = 20


@pytest.mark.parametrize("name", exported_decoders.NAMES)
def test_tokens_are_those_of_the_exported_model(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    original = tmp_path / "model.onnx"
    onnx.save(exported_decoders.model(name, rng), original)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 48, "eos_token_id": 2}))
    decoder = convert_decoder(original, tmp_path / "inplace.onnx")
    assert (decoder.capacity, decoder.vocab_size, decoder.eos_token_ids) == (48, VOCAB, [2])
    assert decoder.sliding_window == (8 if name == "optimum_mistral" else None)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (13, 1, 7)]
    with Generator(tmp_path / "inplace.onnx") as generator:
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [generation.token_ids for generation in found] == [greedy(original, prompt, TOKENS) for prompt in prompts]


def test_windows_of_group_query_attention_are_those_of_onnx_runtime(rng: np.random.Generator, tmp_path: Path) -> None:
    model = exported_decoders.model("genai_llama", rng)
    for node, window in zip((n for n in model.graph.node if n.op_type == "GroupQueryAttention"), (5, 3), strict=True):
        (attribute,) = (entry for entry in node.attribute if entry.name == "local_window_size")
        attribute.i = window
    original = tmp_path / "model.onnx"
    onnx.save(model, original)
    assert convert_decoder(original, tmp_path / "inplace.onnx", capacity=48).sliding_window == 3
    prompt = rng.integers(0, VOCAB, 11).tolist()
    with Generator(tmp_path / "inplace.onnx") as generator:
        found = generator.generate(prompt, max_new_tokens=TOKENS, stop=[]).generations[0]
    assert found.token_ids == greedy(original, prompt, TOKENS)


def _with_multi_head(model: onnx.ModelProto) -> None:
    """Compute each attention of a decoder by optimum by one MultiHeadAttention.

    Keys and values that groups of heads share are repeated in front of it; where each head has its own, the node takes
    past ones and gives out both.
    """
    nodes = model.graph.node
    makers = {output: node for node in nodes for output in node.output}
    n = onnx.helper.make_node
    for softmax in _softmaxes(model):
        scores, mask = makers[softmax.input[0]].input
        query, key = (_behind(makers, name, ("Mul", "Div", "Transpose")) for name in _product(makers, scores).input)
        (product,) = (m for m in nodes if m.op_type == "MatMul" and _leads(makers, m.input[0], softmax.output[0]))
        (turned,) = (m for m in nodes if product.output[0] in m.input and m.op_type == "Transpose")
        (flat,) = (m for m in nodes if turned.output[0] in m.input and m.op_type == "Reshape")
        name, parts = flat.output[0], [query, key, product.input[1]]
        flat.output[0] = f"{name}/unused"
        joined = [makers[part] for part in parts[1:]]
        takes_past = all(node.op_type == "Concat" for node in joined)
        if takes_past:
            parts[1:] = [node.input[1] for node in joined]
        made, flattened = [], [f"{name}/flat.{index}" for index in range(3)]
        for part, wide in zip(parts, flattened, strict=True):
            made.append(n("Transpose", [part], [f"{wide}/tokens"], perm=[0, 2, 1, 3]))
            made.append(n("Reshape", [f"{wide}/tokens", "flat_shape"], [wide]))
        inputs, outputs = [*flattened, "", "", mask], [name]
        if takes_past:
            inputs += [node.input[0] for node in joined]
            outputs += [node.output[0] for node in joined]
            for node in joined:  # masks read its shape
                present, node.output[0] = node.output[0], f"{node.output[0]}/joined"
                for user in nodes:
                    user.input[:] = [node.output[0] if given == present else given for given in user.input]
        made.append(n("MultiHeadAttention", inputs, outputs, f"{name}/MHA", domain="com.microsoft", num_heads=4))
        place = list(nodes).index(product)
        for node in reversed(made):
            nodes.insert(place, node)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 0, -1]), "flat_shape"))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    del model.graph.value_info[:]


def _product(makers: dict[str, onnx.NodeProto], name: str) -> onnx.NodeProto:
    return makers[_behind(makers, name, ("Mul", "Div"))]


def _behind(makers: dict[str, onnx.NodeProto], name: str, passed: tuple[str, ...]) -> str:
    while name in makers and makers[name].op_type in passed and not _of_heads(makers[name]):
        name = makers[name].input[0]
    return name


def _of_heads(node: onnx.NodeProto) -> bool:
    return node.op_type == "Transpose" and list(node.attribute[0].ints) == [0, 2, 1, 3]


def _leads(makers: dict[str, onnx.NodeProto], name: str, to: str) -> bool:
    while name != to and name in makers and makers[name].op_type in ("Where", "Cast"):
        name = makers[name].input[2 if makers[name].op_type == "Where" else 0]
    return name == to


@pytest.mark.parametrize("name", ["optimum_llama", "optimum_gpt2"])
def test_multi_head_attention_is_found(name: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Keys that heads share, repeated behind a Concat (llama), and past keys as inputs of the node (gpt2)."""
    model = exported_decoders.model(name, rng)
    onnx.save(model, tmp_path / "spelled.onnx")
    _with_multi_head(model)
    onnx.save(model, tmp_path / "model.onnx")
    convert_decoder(tmp_path / "model.onnx", tmp_path / "inplace.onnx", capacity=48)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (13, 1, 7)]
    expected = [greedy(tmp_path / "spelled.onnx", prompt, TOKENS) for prompt in prompts]
    assert [greedy(tmp_path / "model.onnx", prompt, TOKENS) for prompt in prompts] == expected
    with Generator(tmp_path / "inplace.onnx") as generator:
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [generation.token_ids for generation in found] == expected


def _with_turned(model: onnx.ModelProto, rotary: int) -> None:
    """Turn queries and keys in front of each MultiHeadAttention, or of the Concat behind its keys, as onnxruntime-genai
    does where it writes that operator; `rotary` dimensions a head (0: all)."""
    nodes, n = model.graph.node, onnx.helper.make_node
    angles = np.arange(64)[:, None] / 10.0 ** np.arange((rotary or 16) // 2)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    tables |= {"flat": np.array([0, 0, -1]), "heads": np.array([0, 0, -1, 16])}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, f"turn/{name}") for name, value in tables.items()
    )
    if all(entry.name != "position_ids" for entry in model.graph.input):
        model.graph.input.append(onnx.helper.make_tensor_value_info("position_ids", 7, ["batch", "new"]))

    def turn(x: str, heads: int) -> onnx.NodeProto:
        options = {"num_heads": heads, "rotary_embedding_dim": rotary} if rotary else {}
        inputs = [x, "position_ids", "turn/cos", "turn/sin"]
        return n("RotaryEmbedding", inputs, [f"{x}/turned"], f"{x}/rotary", domain="com.microsoft", **options)

    for node in list(nodes):
        made: list[onnx.NodeProto] = []
        if node.op_type == "MultiHeadAttention":
            for index in (0, 1) if len(node.input) > 6 else (0,):
                made.append(turn(node.input[index], 4))
                node.input[index] = made[-1].output[0]
        elif node.op_type == "Concat" and node.input[0].startswith("past_key_values") and node.input[0].endswith("key"):
            x = node.input[1]
            made.append(n("Transpose", [x], [f"{x}/tokens"], perm=[0, 2, 1, 3]))
            made.append(n("Reshape", [f"{x}/tokens", "turn/flat"], [f"{x}/flat"]))
            made.append(turn(f"{x}/flat", 2))
            made.append(n("Reshape", [made[-1].output[0], "turn/heads"], [f"{x}/split"]))
            made.append(n("Transpose", [f"{x}/split"], [f"{x}/again"], perm=[0, 2, 1, 3]))
            node.input[1] = f"{x}/again"
        place = list(nodes).index(node)
        for new in reversed(made):
            nodes.insert(place, new)


@pytest.mark.parametrize(("name", "rotary"), [("optimum_llama", 0), ("optimum_llama", 8), ("optimum_gpt2", 0)])
def test_rotary_nodes_in_front_of_multi_head_attention(
    name: str, rotary: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = exported_decoders.model(name, rng)
    _with_multi_head(model)
    plain = model.SerializeToString()
    _with_turned(model, rotary)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "plain.onnx").write_bytes(plain)
    convert_decoder(tmp_path / "model.onnx", tmp_path / "inplace.onnx", capacity=48)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (13, 1, 7)]
    expected = [greedy(tmp_path / "model.onnx", prompt, TOKENS) for prompt in prompts]
    assert expected != [greedy(tmp_path / "plain.onnx", prompt, TOKENS) for prompt in prompts]
    with Generator(tmp_path / "inplace.onnx") as generator:
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [generation.token_ids for generation in found] == expected


def _with_rotary_nodes(model: onnx.ModelProto, domain: str, rotary: int) -> None:
    """Rotate queries and keys of a decoder by genai in nodes of their own, `rotary` dimensions a head (0: all)."""
    graph, nodes = model.graph, model.graph.node
    n = onnx.helper.make_node
    graph.input.append(onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["batch", "new"]))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([64, 32, 32]), "sizes"))
    for table in graph.initializer:
        if rotary and table.name in ("cos_cache", "sin_cache"):
            table.CopyFrom(
                onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(table)[:, : rotary // 2], table.name)
            )
    for group in [node for node in nodes if node.op_type == "GroupQueryAttention"]:
        parts = [f"{group.name}/{part}" for part in "qkv"]
        made = [n("Split", [group.input[0], "sizes"], parts, axis=-1)]
        for index, heads in enumerate((4, 2)):
            inputs = [parts[index], "cos_cache", "sin_cache", "position_ids"]
            if domain:
                inputs.insert(1, inputs.pop())
            options = {"num_heads": heads, "rotary_embedding_dim": rotary} if rotary or not domain else {}
            made.append(n("RotaryEmbedding", inputs, [f"{parts[index]}/turned"], domain=domain, **options))
        group.input[:] = [f"{parts[0]}/turned", f"{parts[1]}/turned", parts[2], *group.input[3:7]]
        for attribute in group.attribute:
            if attribute.name == "do_rotary":
                attribute.i = 0
        place = list(nodes).index(group)
        for node in reversed(made):
            nodes.insert(place, node)
    for stale in [value for value in graph.value_info if value.name in ("cos_cache", "sin_cache")]:
        graph.value_info.remove(stale)
    next(entry for entry in model.opset_import if not entry.domain).version = 23


@pytest.mark.parametrize(("domain", "rotary"), [("com.microsoft", 0), ("com.microsoft", 8), ("", 8)])
def test_rotary_nodes_in_front_of_an_attention(
    domain: str, rotary: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = exported_decoders.model("genai_llama", rng)
    _with_rotary_nodes(model, domain, rotary)
    original = tmp_path / "model.onnx"
    onnx.save(model, original)
    convert_decoder(original, tmp_path / "inplace.onnx", capacity=48)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (13, 1, 7)]
    with Generator(tmp_path / "inplace.onnx") as generator:
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [generation.token_ids for generation in found] == [greedy(original, prompt, TOKENS) for prompt in prompts]
    makers = {output: node for node in onnx.load(tmp_path / "inplace.onnx").graph.node for output in node.output}
    turned = [makers[node.input[0]] for node in makers.values() if node.op_type == "Attention"]
    turned += [
        makers[node.input[1]] for node in makers.values() if "key" in node.output[0] and node.op_type == "TensorScatter"
    ]
    assert [(node.op_type, node.domain) for node in turned] == [("RotaryEmbedding", "")] * 4


def test_transposes_without_perm_are_no_layout() -> None:
    """They are legal, in front of the rotation and behind it, and a graph's output may be one that is left out."""
    n = onnx.helper.make_node
    nodes = [
        n("Transpose", ["x"], ["tokens"]),
        n("RotaryEmbedding", ["tokens", "ids", "cos", "sin"], ["turned"], "r", domain="com.microsoft", num_heads=4),
        n("Reshape", ["turned", "sizes"], ["split"]),
        n("Transpose", ["split"], ["plain"]),
        n("Transpose", ["split"], ["heads"], perm=[0, 2, 1, 3]),
    ]
    tables = {"cos": np.ones((8, 8), np.float32), "sin": np.zeros((8, 8), np.float32), "sizes": np.array([0, 0, 4, -1])}
    inputs = [onnx.helper.make_tensor_value_info("x", 1, None), onnx.helper.make_tensor_value_info("ids", 7, None)]
    outputs = [onnx.helper.make_tensor_value_info(name, 1, None) for name in ("plain", "heads")]
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in tables.items()]
    graph = ir.from_proto(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", inputs, outputs, constants))).graph
    lower_rotary(graph)
    plain, heads = (value.producer() for value in graph.outputs)
    assert plain is not None
    assert heads is not None
    assert (plain.op_type, heads.op_type, heads.domain) == ("Transpose", "RotaryEmbedding", "")


def test_what_tensorrt_needs_holds(rng: np.random.Generator, tmp_path: Path) -> None:
    """One graph of standard operators; each cache is an input and, behind one TensorScatter, an output."""
    onnx.save(exported_decoders.model("genai_llama", rng), tmp_path / "model.onnx")
    convert_decoder(tmp_path / "model.onnx", tmp_path / "inplace.onnx", capacity=32)
    found = onnx.load(tmp_path / "inplace.onnx")
    onnx.checker.check_model(found, full_check=True)
    assert {(entry.domain, entry.version) for entry in found.opset_import} == {("", 24)}
    scatters = {node.input[0]: node.output[0] for node in found.graph.node if node.op_type == "TensorScatter"}
    caches = [value.name for value in found.graph.input if value.name.startswith("past_key")]
    assert scatters == {name: name.replace("past_key_values", "present") for name in caches}
    attentions = [node for node in found.graph.node if node.op_type == "Attention"]
    assert [len(node.output) for node in attentions] == [1, 1]
    assert not any(attribute.name in ("is_causal", "softcap") for node in attentions for attribute in node.attribute)


def _broken(model: onnx.ModelProto, how: str) -> str:
    """Change the model; the words that its refusal must hold."""
    nodes = model.graph.node
    group = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    if how == "softcap":
        group[1].attribute.append(onnx.helper.make_attribute("softcap", 30.0))
        return rf"{group[1].name}' \(GroupQueryAttention\) has softcap"
    if how == "sinks":
        del group[0].input[11:]
        group[0].input.extend([""] * (11 - len(group[0].input)) + ["sink"])
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(4, np.float32), "sink"))
        return "has an input head_sink"
    if how == "packed":
        _with_rotary_nodes(model, "com.microsoft", 0)
        turned = next(node for node in nodes if node.op_type == "RotaryEmbedding")
        turned.attribute.append(onnx.helper.make_attribute("is_packed_batching", 1))
        return r"\(RotaryEmbedding\) has is_packed_batching"
    if how == "own":
        (last,) = (node for node in nodes if "logits" in node.output)
        last.output[0] = "before"
        nodes.append(onnx.helper.make_node("Inverse", ["before"], ["logits"], "fast", domain="com.microsoft"))
        return r"fast' \(Inverse\) is an operator of ONNX Runtime's own; export the model without it"
    if how == "alibi":
        (add,) = (n for n in nodes if n.op_type == "Add" and n.output[0] == _softmaxes(model)[0].input[0])
        nodes.insert(0, onnx.helper.make_node("Constant", [], ["slope"], value_float=-0.5))
        index = list(nodes).index(add)
        nodes.insert(index, onnx.helper.make_node("Add", [add.input[1], "slope"], ["sloped"]))
        add.input[1] = "sloped"
        return "adds to scores that count"
    nodes.insert(0, onnx.helper.make_node("Shape", ["past_key_values.0.key"], ["length"], "reads", start=2, end=3))
    last = next(node for node in nodes if "logits" in node.output)
    last.output[0] = "before"
    nodes.append(onnx.helper.make_node("Cast", ["length"], ["wide"], to=1))
    nodes.append(onnx.helper.make_node("Add", ["before", "wide"], ["logits"]))
    return r"reads.* reads cache 'past_key_values.0.key' beside its attention"


def _softmaxes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Softmax"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("genai_llama", "softcap"),
        ("genai_llama", "sinks"),
        ("genai_llama", "packed"),
        ("genai_llama", "own"),
        ("optimum_llama", "alibi"),
        ("optimum_qwen3", "length"),
    ],
)
def test_what_has_no_place_in_the_contract_is_refused_by_name(
    name: str, how: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    model = exported_decoders.model(name, rng)
    words = _broken(model, how)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelFaultError, match=words):
        convert_decoder(tmp_path / "model.onnx", tmp_path / "inplace.onnx", capacity=32)
    assert not (tmp_path / "inplace.onnx").exists()


@pytest.mark.usefixtures("onnx_in_processes")
def test_build_engine_plans_and_rewrites_a_converted_decoder(rng: np.random.Generator, tmp_path: Path) -> None:
    """--cache inplace, up to the rewritten model, which generates; options that would have no effect are refused."""
    original = tmp_path / "model.onnx"
    onnx.save(exported_decoders.model("optimum_qwen3", rng), original)
    options = ["-o", str(tmp_path / "model.engine"), "--target", "rtx-blackwell", "--cache", "inplace"]
    steps = ["--cache-capacity", "40", "--max-batch", "2", "--stop-after", "rewrite", "--precision", "bf16"]
    invoked(app, [original, *options, *steps])
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (6, 3)]
    with Generator(tmp_path / "model.rewritten.onnx") as generator:
        assert (generator.decoder.capacity, generator.decoder.max_batch) == (40, 2)
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [len(generation.token_ids) for generation in found] == [TOKENS] * 2  # in 16 bits, so maybe other ones
    with Generator(tmp_path / "model.inplace.onnx") as generator:
        found = generator.generate(prompts, max_new_tokens=TOKENS, stop=[]).generations
    assert [generation.token_ids for generation in found] == [greedy(original, prompt, TOKENS) for prompt in prompts]
    invoked(
        app, [original, *options, "--set", "all-logits=yes"], USAGE, "so that --set all-logits would have no effect"
    )


@pytest.mark.parametrize("cache", ["inplace", "keep"])
def test_an_onnx_runtime_without_the_operators_of_caches(
    cache: str, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.10's last is; said before anything is written. Caches that grow need none of them."""
    grows = tmp_path / "grows.onnx"
    onnx.save(exported_decoders.model("optimum_qwen3", rng), grows)
    model = grows if cache == "inplace" else TinyDecoder(rng).save(tmp_path / "updated.onnx")
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    output = tmp_path / "out" / "model.engine"
    options = ["-o", str(output), "--target", "rtx-blackwell", "--stop-after", "plan", "--cache"]
    ran = invoked(app, [model, *options, cache, "--json"], UNAVAILABLE)
    message = json.loads(ran.stdout)["error"]
    assert message.startswith(f"{model}: ONNX Runtime 1.23.2 is too old for models with caches")
    assert "install onnxruntime 1.25 or newer" in message
    assert not output.parent.exists()
    invoked(app, [grows, *options, "keep"])
