"""A Hugging Face directory with quantized weights is exported as the model that it stands for."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_formats.directories import quantize_directory
from checkpoint_formats.writers import FORMATS, Writer
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.builder.export import deferred
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.export.loading import load_directory
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

WITHOUT_LIBRARIES = """
import importlib.machinery, sys
import numpy as np
finder, found = importlib.machinery.PathFinder, importlib.machinery.PathFinder.find_spec
missing = "accelerate gptqmodel auto_gptq optimum awq bitsandbytes compressed_tensors torchao kernels".split()
finder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] in missing else found(name, *rest))
import torch, transformers
from pathlib import Path
from trt_nvfp4.builder.export.loading import load_directory
assert not transformers.utils.is_accelerate_available()
for directory in sys.argv[1:]:
    with torch.no_grad():
        model = load_directory(Path(directory), transformers, False).model
        np.save(directory + ".npy", model(torch.arange(12)[None]).logits.numpy())
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with one layer, in float32."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """One of four experts a layer, which files hold apart and the model stacks, and a head that is the embedding."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32, tie_word_embeddings=True
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


def loaded_logits(directory: Path) -> np.ndarray:
    """Of the model that is exported."""
    with torch.no_grad():
        found: np.ndarray = load_directory(directory, transformers, False).model(torch.arange(12)[None]).logits.numpy()
    return found


def exported_logits(directory: Path) -> np.ndarray:
    exported = export.export(directory, directory.with_suffix(".onnx"))
    ids = np.arange(12, dtype=np.int64)[None]
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0])


def expected_logits(directory: Path, whole: dict[str, torch.Tensor], folder: Path) -> np.ndarray:
    """By transformers, of a directory with the weights in float32."""
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: t.float().contiguous() for k, t in whole.items()}, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.arange(12)[None]).logits.numpy()
    return found


def of_all(writer: Writer) -> Callable[[str], Writer | None]:
    return lambda module: writer if module.endswith("_proj") else None


@pytest.mark.parametrize("name", ["nvfp4 compressed-tensors", "fp8 blockwise", "gptq 4 act order", "awq"])
def test_outputs(name: str, llama: Path, rng: np.random.Generator) -> None:
    writer, quantization = FORMATS[name]
    whole = quantize_directory(llama, rng, of_all(writer), quantization)
    expected = expected_logits(llama, whole, llama.with_name("whole"))
    np.testing.assert_allclose(loaded_logits(llama), expected, rtol=1e-5, atol=1e-5)


def test_libraries_of_formats_are_not_needed(llama: Path, rng: np.random.Generator) -> None:
    """Without the packages by which transformers reads them: accelerate, gptqmodel, bitsandbytes, ..."""
    directories, expected = [], []
    for name in ("gptq 4 act order", "awq", "int8 bitsandbytes", "nf4 bitsandbytes", "int8 torchao"):
        directory = shutil.copytree(llama, llama.with_name(name))
        writer, quantization = FORMATS[name]
        whole = quantize_directory(directory, rng, of_all(writer), quantization)
        directories.append(str(directory))
        expected.append(expected_logits(directory, whole, directory.with_name(f"{name} whole")))
    subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES, *directories], check=True, timeout=300)
    for directory, logits in zip(directories, expected, strict=True):
        np.testing.assert_allclose(np.load(f"{directory}.npy"), logits, rtol=1e-5, atol=1e-5, err_msg=directory)


def test_mixture_of_formats_and_experts(experts: Path, rng: np.random.Generator) -> None:
    """NVFP4 experts, FP8 attention with scales of its caches, a router in 16 bits, a quantized head in place of the
    tied one."""

    def writer_of(module: str) -> Writer | None:
        if ".experts." in module:
            return FORMATS["nvfp4 modelopt"][0]
        return FORMATS["fp8 per tensor"][0] if module.endswith("_proj") else None

    whole = quantize_directory(experts, rng, writer_of, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    stored = load_file(experts / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{of}_proj.{of}_scale": torch.tensor(0.5) for of in "kv"}
    save_file({**stored, **scales}, experts / "model.safetensors", metadata={"format": "pt"})
    expected = expected_logits(experts, whole, experts.with_name("whole"))
    np.testing.assert_allclose(exported_logits(experts), expected, rtol=1e-5, atol=1e-5)


def test_weights_of_16_bits_stay_so(llama: Path, rng: np.random.Generator) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    writer, quantization = FORMATS["fp8 per channel"]
    quantize_directory(llama, rng, of_all(writer), quantization)
    loaded = load_directory(llama, transformers, False)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.quantized is not None
    assert loaded.quantized.formats == {"FP8": 7}


def test_weights_are_read_each_time_that_something_computes_with_them(
    experts: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stack of experts those alone that tokens go to; the logits are those of weights in memory."""
    monkeypatch.setattr(deferred, "SMALL", 0)
    writer, quantization = FORMATS["nvfp4 modelopt"]
    quantize_directory(experts, rng, lambda module: writer if ".experts." in module else None, quantization)
    whole = load_directory(experts, transformers, False).model
    monkeypatch.setattr(deferred, "SMALL", 1 << 20)
    kept = load_directory(experts, transformers, False).model
    assert all(type(parameter) is torch.nn.Parameter for parameter in kept.parameters())
    assert all(isinstance(parameter, deferred.DeferredTensor) for parameter in whole.parameters())
    read: list[str] = []
    of_file = SafetensorsFiles.read
    monkeypatch.setattr(
        SafetensorsFiles, "read", lambda files, name, rows=None: (read.append(name), of_file(files, name, rows))[1]
    )
    with torch.no_grad():
        # Products of rows and of whole matrices may add in another order.
        torch.testing.assert_close(whole(torch.tensor([[3]])).logits, kept(torch.tensor([[3]])).logits)
    assert len({name.partition(".experts.")[2].partition(".")[0] for name in read if ".experts." in name}) == 2


def change(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def refusal(directory: Path) -> str:
    with pytest.raises(ModelFaultError) as raised:
        export.export(directory, directory.with_suffix(".onnx"))
    assert not directory.with_suffix(".onnx").exists()
    return str(raised.value)


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    "key",
    [
        f"{UP}zero_points",
        f"{UP}input_scale",
        "model.layers.0.mlp.lora_A.weight",
        "model.layers.1.mlp.up_proj.weight",
        "stray.weight",
    ],
)
def test_keys_that_the_model_does_not_use(key: str, llama: Path) -> None:
    change(llama, {key: torch.ones(4)})
    assert f'"{key}"' in refusal(llama)


def test_weights_that_are_missing(llama: Path, rng: np.random.Generator) -> None:
    writer, quantization = FORMATS["fp8 per tensor"]
    quantize_directory(llama, rng, of_all(writer), quantization)
    stored = load_file(llama / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(UP)}
    save_file(kept, llama / "model.safetensors", metadata={"format": "pt"})
    assert f"lack 1 of the model's weights, {UP}weight" in refusal(llama)


def test_tensors_that_do_not_fit_are_named_though_transformers_does_not(llama: Path, rng: np.random.Generator) -> None:
    writer, quantization = FORMATS["fp8 per channel"]
    quantize_directory(llama, rng, of_all(writer), quantization)
    change(llama, {f"{UP}weight_scale": torch.ones(95, 1)})
    assert f"{UP}weight_scale holds scales [95, 1], which do not fit values [96, 64]" in refusal(llama)


def test_scales_that_are_lost(llama: Path) -> None:
    change(llama, {f"{UP}weight": torch.zeros(96, 64).to(torch.float8_e4m3fn)})
    message = refusal(llama)
    assert f"{UP}weight is F8_E4M3" in message
    assert "or give the original model" in message


def test_tables_that_the_model_computes(llama: Path) -> None:
    change(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert load_directory(llama, transformers, False).quantized is None


@pytest.mark.parametrize("key", ["score.weight", "lm_head.weight"])
def test_heads_of_other_tasks_and_tied_ones(key: str, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": key == "lm_head.weight"}))
    change(llama, {key: load_file(llama / "model.safetensors")["model.embed_tokens.weight"]})
    loaded_logits(llama)


def test_what_only_other_classes_of_bert_have(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {"bert.pooler.dense.weight", "cls.seq_relationship.weight"} <= stored.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert type(load_directory(tmp_path, transformers, False).model).__name__ == "BertForMaskedLM"


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """GLM's, as many behind the last layer as the configuration states."""
    config = transformers.Glm4MoeConfig(**SIZES, head_dim=32, first_k_dense_replace=1, num_nextn_predict_layers=1)
    transformers.Glm4MoeForCausalLM(config).save_pretrained(tmp_path)
    further = "model.layers.1.eh_proj.weight"
    change(tmp_path, {further: torch.ones(4)})
    load_directory(tmp_path, transformers, False)
    change(tmp_path, {"model.layers.2.eh_proj.weight": torch.ones(4)})
    with pytest.raises(BuilderError, match=r"layers\.2\.eh_proj"):
        load_directory(tmp_path, transformers, False)


def test_head_that_a_bare_model_lacks(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert type(load_directory(llama, transformers, False).model).__name__ == "LlamaModel"
