"""Hugging Face directories, small and with random weights, to ONNX and on to a verified engine."""

import json
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UnavailableError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.export import torch_module
from trt_nvfp4.builder.export.fixed_sizes import FixedSizes, ImageSize
from trt_nvfp4.builder.export.plain import check_kind
from trt_nvfp4.builder.model import onnx_file
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.targets import find_target

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
ENCODER = {key: DECODER[key] for key in DECODER if key not in ("num_key_value_heads", "head_dim")}
IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modernbert": ("ModernBertConfig", "ModernBertModel", {**ENCODER, "pad_token_id": 0}),
    "bert": ("BertConfig", "BertModel", ENCODER),
    "vit": ("ViTConfig", "ViTForImageClassification", {**IMAGE, "num_attention_heads": 4}),
}


def saved_model(name: str, folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    config_class, model_class, options = CONFIGS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).to(dtype).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_exported_model_computes_the_same(tmp_path: Path, seed: int, name: str) -> None:
    model = saved_model(name, tmp_path / name, seed)
    path = export.export(tmp_path / name, tmp_path / "m.onnx")
    assert onnx_file.is_exported(onnx_file.read(path))
    session = onnxruntime.InferenceSession(path)
    if name == "vit":
        # Another batch size than the exporter saw.
        inputs = {"pixel_values": torch.rand(3, 3, 32, 32)}
    else:
        ids = torch.randint(0, 100, (3, 11))
        mask = torch.ones_like(ids)
        mask[0, 7:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = model(**inputs)[0].numpy()
    (output,) = session.get_outputs()
    assert output.name == ("logits" if name == "vit" else "last_hidden_state")
    (actual,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_large_weights_go_beside_the_model(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_model("bert", tmp_path / "bert", seed)
    monkeypatch.setattr(torch_module, "EXTERNAL_DATA_BYTES", 1000)
    path = export.export(tmp_path / "bert", tmp_path / "out" / "m.onnx")
    assert sorted(file.name for file in path.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert onnxruntime.InferenceSession(path).get_inputs()


# Exports of the others are built by test_zoo_engines.py.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("modernbert", torch.bfloat16), ("vit", torch.float32)], ids=str)
def test_directory_to_engine(tmp_path: Path, seed: int, name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    saved_model(name, tmp_path / name, seed, dtype)
    request = pipeline.Request(
        tmp_path / name,
        find_target("rtx-blackwell"),
        output=tmp_path / "out" / "o.engine",
        require="nvfp4",
        task="features",
    )
    report = json.loads(pipeline.run(request).json())
    mlps = [entry for entry in report["subgraphs"] if entry["kind"] != "linear"]
    assert sum(entry["shapes"].get("layers", 1) for entry in mlps) == 2
    assert {entry["realized"] for entry in mlps} == {"nvfp4 plugin"}
    assert report["plugin_layers"] == len(mlps)
    assert (tmp_path / "out" / "o.engine").stat().st_size == report["engine_bytes"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "not a Hugging Face model directory"),
        ("{", "not JSON"),
        ("{}", "no model_type"),
        ("null", "no model_type"),
        ('{"model_type": "bert"}', "cannot load this model"),
        ('{"model_type": "no-such-model"}', "cannot load this model"),
    ],
)
def test_directory_at_fault(tmp_path: Path, config: str | None, text: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelFaultError, match=text):
        export.export(tmp_path, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "llama", "max_position_embeddings": 77}, 77),
        ({"model_type": "gpt2", "n_positions": 77}, 77),
        ({"model_type": "mpt", "max_seq_len": 77}, 77),
        ({"model_type": "bloom"}, None),
        ({"model_type": "layoutxlm", "max_position_embeddings": 77}, 77),  # has no code of its own
        ({"model_type": "roberta", "max_position_embeddings": 5, "pad_token_id": 7}, None),
        ({"model_type": "xlnet"}, None),  # by the name of -1
    ],
)
def test_sequence_limit_is_read_from_the_configuration(
    tmp_path: Path, config: dict[str, Any], limit: int | None
) -> None:
    assert export.longest_sequence(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert export.longest_sequence(tmp_path) == limit


# Those whose positions count from the padding's id (MPNet: from 1), and others.
POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text", "bert", "gpt2", "opt")


@pytest.mark.parametrize(
    ("name", "pad"), [(name, pad) for name in POSITIONS for pad in (1, 5) if (name, pad) != ("mpnet", 5)]
)
def test_sequence_limit_is_the_models_own(tmp_path: Path, name: str, pad: int) -> None:
    names = {"gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2}, "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16}}
    sizes = names.get(name, {"intermediate_size": 16}) | ({} if name == "gpt2" else {"hidden_size": 16})
    sizes |= {} if name == "gpt2" else {"num_hidden_layers": 1, "num_attention_heads": 2}
    limit = {"n_positions" if name == "gpt2" else "max_position_embeddings": 24}
    config = transformers.AutoConfig.for_model(name, **sizes, **limit, vocab_size=40, pad_token_id=pad)
    model = transformers.AutoModel.from_config(config).eval()
    config.save_pretrained(tmp_path)
    longest = export.longest_sequence(tmp_path)
    assert longest is not None
    ids = torch.full((1, longest + 1), 9)
    model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids)[:, :-1])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_limit_of_onnx_files_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "m.onnx").write_bytes(b"")
    assert export.longest_sequence(tmp_path / "m.onnx") is None


@pytest.mark.parametrize("missing", ["transformers", "onnxscript"])
def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UnavailableError, match=f"pip install transformers onnxscript .*{missing}"):
        export.export(tmp_path, tmp_path / "m.onnx")


def alter(folder: Path, **changes: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def without(folder: Path, part: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, *texts: str) -> None:
    with pytest.raises(ModelFaultError) as failure:
        export.export(folder, folder / "out" / "m.onnx")
    for text in texts:
        assert text in str(failure.value)
    assert not (folder / "out" / "m.onnx").exists()


def test_weights_that_the_files_lack_are_not_made_up(tmp_path: Path, seed: int) -> None:
    saved_model("bert", tmp_path / "bert", seed)
    without(tmp_path / "bert", "layer.1.output.dense.weight")
    refused(tmp_path / "bert", "lack 1 of the model's weights", "encoder.layer.1.output.dense.weight")


def test_weights_that_no_output_depends_on_may_be_absent(tmp_path: Path, seed: int) -> None:
    saved_model("bert", tmp_path / "bert", seed)
    without(tmp_path / "bert", "pooler")
    assert export.export(tmp_path / "bert", tmp_path / "m.onnx").exists()


def test_weights_that_cannot_be_read(tmp_path: Path, seed: int) -> None:
    saved_model("bert", tmp_path, seed)
    weights = tmp_path / "model.safetensors"
    alter(tmp_path, intermediate_size=160)
    refused(tmp_path, "weights and config.json do not fit", "[128]", "[160]")
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(tmp_path, "not a safetensors file, or an incomplete one")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(tmp_path, "model.safetensors: a Git LFS pointer", "git lfs pull")


def test_another_model_is_not_exported_instead(tmp_path: Path, seed: int) -> None:
    saved_model("bert", tmp_path, seed)
    alter(tmp_path, architectures=["AcmeModel"])
    refused(tmp_path, "names the architecture AcmeModel, which transformers")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "holds an adapter", "--adapter")


def test_size_of_images_in_a_part_of_the_configuration(tmp_path: Path, seed: int) -> None:
    """Of a model of images that was half of a pair; as is their number of channels."""
    torch.manual_seed(seed)
    image = {**IMAGE, "num_attention_heads": 4, "num_hidden_layers": 1, "num_channels": 1}
    config = transformers.SiglipConfig(vision_config=image, text_config={**ENCODER, "num_hidden_layers": 1})
    transformers.SiglipForImageClassification(config).save_pretrained(tmp_path / "siglip")
    session = onnxruntime.InferenceSession(export.export(tmp_path / "siglip", tmp_path / "m.onnx"))
    (pixels,) = session.get_inputs()
    assert pixels.shape[1:] == [1, 32, 32]


def saved_with_backbone(name: str, folder: Path) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    if name == "vitpose":
        backbone = transformers.VitPoseBackboneConfig(
            **sizes, image_size=[48, 32], patch_size=[8, 8], out_indices=[2], num_channels=3
        )
        model = transformers.VitPoseForPoseEstimation(transformers.VitPoseConfig(backbone_config=backbone))
    else:
        backbone = transformers.Dinov2Config(
            **sizes, image_size=28, patch_size=14, out_indices=[1, 2, 3, 4], reshape_hidden_states=False
        )
        necks = {"neck_hidden_sizes": [8] * 4, "reassemble_hidden_size": 32, "fusion_hidden_size": 8}
        config = transformers.DepthAnythingConfig(backbone_config=backbone, patch_size=14, **necks)
        model = transformers.DepthAnythingForDepthEstimation(config)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["vitpose", "depth_anything"])
def test_size_of_images_in_the_configuration_of_a_backbone(tmp_path: Path, seed: int, name: str) -> None:
    torch.manual_seed(seed)
    model = saved_with_backbone(name, tmp_path / name)
    session = onnxruntime.InferenceSession(export.export(tmp_path / name, tmp_path / "m.onnx"))
    (pixels,) = session.get_inputs()
    assert pixels.shape[1:] == ([3, 48, 32] if name == "vitpose" else [3, 28, 28])
    images = torch.rand(3, *pixels.shape[1:])
    with torch.no_grad():
        expected = model(pixel_values=images)[0].numpy()
    (actual,) = session.run(None, {"pixel_values": images.numpy()})
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_size_of_images_that_is_stated_nowhere(tmp_path: Path, seed: int) -> None:
    """The advice holds: a size that the user names is taken."""
    torch.manual_seed(seed)
    sizes = {"hidden_sizes": [16] * 4, "depths": [1] * 4, "decoder_hidden_size": 16, "num_attention_heads": [2] * 4}
    transformers.SegformerForImageClassification(transformers.SegformerConfig(**sizes)).save_pretrained(tmp_path)
    refused(tmp_path, "config.json: states no image_size", "backbone_config", "--set image-size=HxW")
    fixed = FixedSizes(ImageSize(64, 32), batch=3)
    (pixels,) = onnxruntime.InferenceSession(export.export(tmp_path, tmp_path / "m.onnx", fixed=fixed)).get_inputs()
    assert pixels.shape == [3, 3, 64, 32]


def test_every_output_of_the_head_is_exported(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**ENCODER)).eval()
    model.save_pretrained(tmp_path / "bert")
    session = onnxruntime.InferenceSession(export.export(tmp_path / "bert", tmp_path / "m.onnx"))
    assert [output.name for output in session.get_outputs()] == ["start_logits", "end_logits"]
    ids = torch.randint(0, 100, (3, 11))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    actual = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        expected = model(**inputs)
    for ours, theirs in zip(actual, (expected.start_logits, expected.end_logits), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-3, atol=1e-4)


def test_models_of_several_inputs_are_refused(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16, "vocab_size": 100}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    refused(tmp_path / "t5", "generates with an encoder and a decoder")
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 100}, vision_config={**tower, "image_size": 32, "patch_size": 8}
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path / "clip")
    refused(tmp_path / "clip", "takes input_ids and pixel_values")


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("Phi4MultimodalForCausalLM", "input_ids and image_pixel_values and audio_input_features"),
        ("VJEPA2Model", "pixel_values_videos"),
        ("PatchTSTModel", "past_values"),
        ("TimesFmModelForPrediction", "past_values"),
        ("Siglip2VisionModel", "pixel_values and pixel_attention_mask and spatial_shapes"),
        ("LlamaModel", None),
        ("Gemma3ForCausalLM", None),
        ("Qwen3ForSequenceClassification", None),
        ("BertModel", None),
        ("RoCBertForPreTraining", None),
        ("T5EncoderModel", None),
        ("BartForSequenceClassification", None),
        ("CLIPTextModel", None),
        ("ViTForImageClassification", None),
    ],
)
def test_what_models_take(tmp_path: Path, name: str, takes: str | None) -> None:
    """By the names in forward's signature; nothing that may be left out but images and sound counts."""
    model = getattr(transformers, name)
    instance = SimpleNamespace(
        forward=MethodType(model.forward, object()), config=SimpleNamespace(image_size=32), can_generate=lambda: False
    )
    if takes is None:
        check_kind(tmp_path, instance)
        return
    with pytest.raises(BuilderError, match=f"takes {takes}, and models of one input of input_ids, pixel_values or"):
        check_kind(tmp_path, instance)


@pytest.mark.parametrize("limit", [64, 65])
def test_models_that_loop_over_blocks_of_the_sequence(tmp_path: Path, seed: int, limit: int) -> None:
    """torch.onnx unrolls the loop for as many blocks as the example has, and says nothing."""
    torch.manual_seed(seed)
    sizes = {"num_local_experts": 1, "num_experts_per_tok": 1, "block_size": 64, "max_position_embeddings": limit}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    config = transformers.MiniMaxConfig(**{**DECODER, **sizes, **layers})
    transformers.MiniMaxForCausalLM(config).save_pretrained(tmp_path)
    if limit > 64:
        refused(tmp_path, "bounds the sequence of MiniMaxForCausalLM at 64", "lower config.json's limit of 65 to that")
    else:
        session = onnxruntime.InferenceSession(export.export(tmp_path, tmp_path / "m.onnx"))
        ids = np.ones((1, limit), np.int64)
        assert session.run(None, {"input_ids": ids, "attention_mask": ids})[0].shape == (1, limit, 100)


def test_sparse_activations(tmp_path: Path, seed: int) -> None:
    """Gemma 3n cuts activations off at a quantile of the normal distribution, by its inverse error function."""
    torch.manual_seed(seed)
    sizes = {
        **DECODER,
        "intermediate_size": [128],
        "num_hidden_layers": 1,
        "vocab_size_per_layer_input": 100,
        "laurel_rank": 8,
    }
    sizes |= {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95]}
    config = transformers.Gemma3nTextConfig(**sizes, layer_types=["full_attention"])
    model = transformers.Gemma3nForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "gemma")
    session = onnxruntime.InferenceSession(export.export(tmp_path / "gemma", tmp_path / "m.onnx"))
    ids = torch.randint(0, 100, (3, 11))
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.numpy()
    (actual,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": np.ones((3, 11), np.int64)})
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


def test_models_that_loop_over_the_sequence_are_refused(tmp_path: Path, seed: int) -> None:
    """torch.onnx unrolls the loop for the example's length, and says nothing."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "state_size": 2, "num_hidden_layers": 1, "vocab_size": 100}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(tmp_path)
    refused(tmp_path, "fixes the sequence of MambaForCausalLM", "torch.onnx.export at the size that you need")


def test_what_torch_cannot_export(tmp_path: Path, seed: int) -> None:
    """Its message goes on with a list, of which nothing is said."""
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 100}
    transformers.XLNetModel(transformers.XLNetConfig(**sizes)).save_pretrained(tmp_path)
    refused(tmp_path, f"for aten.sub with the provided arguments; {export.CHANGE_IT}")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("It fails.\nAs follows", "It fails"),
        ("It fails. Tried:\nmuch", "It fails"),
        ("It fails with:\nmuch", "It fails with"),
        ("", "ValueError"),
    ],
)
def test_reasons_are_whole_sentences(message: str, reason: str) -> None:
    assert export.reason_of(ValueError(message), torch.nn.Module()) == f"{reason}; {export.CHANGE_IT}"


def test_experts_are_named_where_there_are_some(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, rope_parameters=rope)).save_pretrained(tmp_path)
    refused(
        tmp_path, "cannot export LlamaForCausalLM: what it runs depends on its inputs' values, and a", export.CHANGE_IT
    )


def test_models_that_loop_over_chosen_experts_are_refused(
    tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message says what is in the way, and torch's print of the graph stays off the terminal."""
    torch.manual_seed(seed)
    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 100}
    config = transformers.DbrxConfig(**sizes, attn_config=attention, ffn_config=experts)
    transformers.DbrxForCausalLM(config).save_pretrained(tmp_path)
    refused(tmp_path, "cannot export DbrxForCausalLM", "depends on its inputs' values", "loop over the experts")
    assert "def forward" not in "".join(capfd.readouterr())
