"""Small files of each kind that commands read besides models, and what reads them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from fuzz import checkpoint_files
from fuzz.models import HEAD, models
from safetensors.torch import save_file
from weights_files import written

from onnx_models.tiny_decoder import TinyDecoder
from trt_nvfp4.builder.bench.result import check_destination
from trt_nvfp4.builder.components.images import Preprocessing
from trt_nvfp4.builder.components.manifest import Flow, Loop, Manifest, Part, Port
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.source import is_of_parts
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.decoders import end_tokens
from trt_nvfp4.builder.export.expected_inputs import expected_inputs
from trt_nvfp4.builder.export.huggingface import load_model
from trt_nvfp4.builder.generate.caches import cache_shapes
from trt_nvfp4.builder.generate.onnx_runner import checked_decoder
from trt_nvfp4.builder.generate.tensorrt_runner import decoder_beside
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.parallel.manifest import RANK, RankFolder, note
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.report import html, inspection
from trt_nvfp4.builder.targets import TARGETS
from trt_nvfp4.builder.tensorrt import build_script, load, weights_file
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.samples.samples import InputSpec, load_samples
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.common import nvfp4

SPECS = {"x": InputSpec(("batch", 4), np.dtype(np.float32)), "n": InputSpec(("batch",), np.dtype(np.int64))}
IDS = {name: InputSpec(("batch", "sequence"), np.dtype(np.int64)) for name in ("input_ids", "attention_mask")}
VISION = """
g (float[images, 3, 4, 4] pixel_values) => (float[images, 3] image_embeds) {
    axes = Constant<value_ints = [2, 3]>()
    a = ReduceMean<keepdims = 0>(pixel_values, axes)
    image_embeds = LpNormalization<axis = 1>(a)
}
"""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Kind:
    """`file` in the folder is changed; `read` reads it there."""

    file: str
    read: Callable[[Path], object]


def _consumed(path: Path, specs: dict[str, InputSpec], tokenizer: Path | None = None) -> None:
    for _ in load_samples(path, specs, tokenizer):
        pass


def _checkpoint(folder: Path) -> None:
    checkpoint = NVFP4Checkpoint(folder / "packed.safetensors")
    for module in checkpoint:
        checkpoint[module]


def _weights(file: Path) -> None:
    found = weights_file.read_header(file)
    for tensor in found.tensors:
        for _ in found.chunks(tensor):
            pass


class _Tuned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)


def _plan(folder: Path) -> None:
    """From here on the plan is used, too: with the model that it is of."""
    inspection.inspect(folder / "o.plan.yaml")
    output = folder / "again.engine"
    request = pipeline.Request(
        folder / "m.onnx", TARGETS["ada"], output, plan=folder / "o.plan.yaml", stop_after="rewrite"
    )
    pipeline.run(request)


def _page(folder: Path) -> None:
    inspection.inspect(folder / "o.report.json")
    load.opt_shapes(folder / "o.engine")
    html.write(folder / "o.report.json")


def _bundle(folder: Path) -> None:
    inspection.inspect(folder / "bundle")
    decoder_beside(folder / "bundle" / "o.engine")


def _decoder(folder: Path) -> None:
    """Metadata of a decoder's caches, in an ONNX file, a bundle's manifest and a rank."""
    model = onnx.load(folder / "ranks" / "rank0.rewritten.onnx", load_external_data=False)
    model.metadata_props[0].value = (folder / "decoder.json").read_text(errors="replace")
    cache_shapes(checked_decoder(model, folder / "decoder.json"), 2)


def _ranks(folder: Path) -> None:
    inspection.inspect(folder / "ranks")
    RankFolder.read(folder / "ranks").models()


def _loaded(folder: Path) -> None:
    """A model's directory: what is read of it before it is exported."""
    expected_inputs(folder / "model", "auto", CacheOptions())
    model, _ = load_model(folder / "model")
    end_tokens(model)


def _run_parts(folder: Path) -> None:
    with Pipeline(folder / "vision", runner="onnxruntime") as pipeline:
        pipeline.embed(images=[np.zeros((6, 8, 3), np.uint8)])


KINDS = {
    "plan": Kind("o.plan.yaml", _plan),
    "report": Kind("o.report.json", _page),
    "bundle": Kind("bundle/manifest.json", _bundle),
    "job": Kind("bundle/manifest.json", lambda folder: build_script.read_job(folder / "bundle/manifest.json", None)),
    "parts": Kind("parts/components.json", lambda folder: inspection.inspect(folder / "parts")),
    "bench": Kind("o.bench.json", lambda folder: check_destination(folder / "o.bench.json")),
    "statistics": Kind("o.statistics.json", lambda folder: Statistics.load(folder / "o.statistics.json")),
    "array of statistics": Kind("o.statistics/array.npy", lambda folder: Statistics.load(folder / "o.statistics.json")),
    "adapter's config": Kind("lora/adapter_config.json", lambda folder: Adapter(folder / "lora").merge(_Tuned())),
    "adapter": Kind("lora/adapter_model.safetensors", lambda folder: Adapter(folder / "lora").merge(_Tuned())),
    "packed weights": Kind("packed.safetensors", _checkpoint),
    "stripped weights": Kind("stripped.safetensors", lambda folder: _weights(folder / "stripped.safetensors")),
    "sample": Kind("sample.npz", lambda folder: _consumed(folder / "sample.npz", SPECS)),
    "Polygraphy's samples": Kind("inputs.json", lambda folder: _consumed(folder / "inputs.json", SPECS)),
    "chats": Kind("chats.jsonl", lambda folder: _consumed(folder / "chats.jsonl", IDS, folder / "tokenizer")),
    "configuration": Kind("config.json", is_of_parts),
    "decoder": Kind("decoder.json", _decoder),
    "ranks": Kind("ranks/parallel.json", _ranks),
    "a rank": Kind("ranks/rank1.rewritten.onnx", _ranks),
    "pair of encoders": Kind("vision/components.json", _run_parts),
    "a part": Kind("vision/vision.onnx", _run_parts),
    "model's configuration": Kind("model/config.json", _loaded),
    "model's generation": Kind("model/generation_config.json", _loaded),
    "model's weights": Kind("model/model.safetensors", _loaded),
    **{
        file: Kind(f"tokenizer/{file}", lambda folder: _consumed(folder / "chats.jsonl", IDS, folder / "tokenizer"))
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    },
    **{name: Kind(file, read) for name, (file, read) in checkpoint_files.readers().items()},
}


def write(folder: Path) -> None:
    """Writes a sound file of each kind, `Kind.file`, and what belongs to it."""
    (folder / "m.onnx").write_bytes(models()["plain"].SerializeToString())
    ada = partial(pipeline.Request, target=TARGETS["ada"])
    pipeline.run(ada(folder / "m.onnx", output=folder / "o.engine", precision="fp8", stop_after="rewrite"))
    pipeline.run(ada(folder / "o.rewritten.onnx", bundle=folder / "bundle", plan=folder / "o.plan.yaml"))
    port = Port("float32", ("batch", 4))
    encoder, policy = Part("encoder", {"x": port}, {"y": port}), Part("policy", {"a": port}, {"b": port}, Loop(2))
    (folder / "parts").mkdir()
    Manifest("run", [encoder, policy], [Flow("encoder.y", "policy.a")], {"steps": 2}).save(folder / "parts")
    shutil.copy(folder / "o.report.json", folder / "o.bench.json")
    rng = np.random.default_rng(0)
    channels = rng.random(8).astype(np.float32)
    Statistics({"x": 1.0}, 2, {"x": {"channel_amax": channels}}, rows={"x": 4}).save(folder / "o.statistics.json")
    (array,) = (folder / "o.statistics").iterdir()
    statistics = folder / "o.statistics.json"
    statistics.write_text(statistics.read_text().replace(array.name, "array.npy"))
    array.rename(array.with_name("array.npy"))
    _write_tensors(folder, rng)
    np.savez(folder / "sample.npz", x=rng.random((2, 4), np.float32), n=np.ones(2, np.int64))
    from polygraphy.json import save_json

    save_json([{"x": rng.random((2, 4), np.float32), "n": np.ones(2, np.int64)}], str(folder / "inputs.json"))
    _write_texts(folder)
    _write_models(folder)
    checkpoint_files.write(folder)


def _write_models(folder: Path) -> None:
    import transformers

    tiny = TinyDecoder(np.random.default_rng(0))
    (folder / "decoder.json").write_text(tiny.decoder.json())
    (ranks := folder / "ranks").mkdir()
    RankFolder(ranks, "ada", 2).save()
    for rank in range(2):
        path = tiny.save(ranks / f"rank{rank}.rewritten.onnx")
        proto = onnx.load(path)
        proto.metadata_props.add(key=RANK, value=note(rank, 2, "tiny"))
        onnx.save(proto, path)
    (vision := folder / "vision").mkdir()
    onnx.save(onnx.parser.parse_model(HEAD + VISION), vision / "vision.onnx")
    size = ("images", 3, 4, 4)
    part = Part("vision", {"pixel_values": Port("float32", size)}, {"image_embeds": Port("float32", ("images", 3))})
    shape = Preprocessing(4, 4, "bicubic", 1 / 255, [0.5] * 3, [0.5] * 3, 4)
    settings = {"embeds": {"longest": 8, "padding": 0}, "preprocessing": shape.json(), "no_preprocessing": None}
    Manifest("run", [part], (), settings).save(vision)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder / "model")


def _write_tensors(folder: Path, rng: np.random.Generator) -> None:
    (folder / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "alpha_pattern": {"q_proj": 5}, "use_rslora": False}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
    factors = {"q_proj.lora_A.weight": torch.ones(2, 8), "q_proj.lora_B.weight": torch.ones(8, 2)}
    whole = {"head.weight": torch.ones(4, 8)}
    tensors = {f"base_model.model.{name}": tensor for name, tensor in (factors | whole).items()}
    save_file(tensors, folder / "lora" / "adapter_model.safetensors")
    packed, block_scales, scale = nvfp4.quantize(torch.from_numpy(rng.standard_normal((16, 32)).astype(np.float32)))
    parts = {"weight": packed, "weight_scale": block_scales, "weight_scale_2": scale, "input_scale": scale.clone()}
    save_file({f"up.{name}": tensor for name, tensor in parts.items()}, folder / "packed.safetensors")
    arrays = {"a": np.ones((4, 4), np.int8), "b": np.ones(3, np.float32)}
    written(folder, arrays).path.rename(folder / "stripped.safetensors")


def _write_texts(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (target := folder / "tokenizer").mkdir()
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "user", ":", "one", "two", "three"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    settings: dict[str, Any] = {"vocab_size": 7, "max_position_embeddings": 8, "architectures": ["LlamaForCausalLM"]}
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache_scheme": {"num_bits": 8}}
    for place in (target, folder):
        (place / "config.json").write_text(json.dumps(settings | {"quantization_config": quantized}))
    chat = {"messages": [{"role": "user", "content": "one two three"}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps({"text": "one two"}) + "\n")
