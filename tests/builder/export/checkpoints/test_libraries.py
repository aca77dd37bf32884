"""Directories written by the formats' own libraries are read as those libraries read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory, quantized_directory

transformers = pytest.importorskip("transformers")

# The groups of most formats are 128 columns.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "architectures": ["LlamaForCausalLM"],
}
LAYER = "model.layers.0."


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def read(folder: Path) -> QuantizedDirectory:
    found = quantized_directory(folder)
    assert found is not None
    assert set(found.weights) == {name for name in found.state_dict() if name.endswith("_proj.weight")}
    return found


def assert_values(
    found: QuantizedDirectory, expected: dict[str, torch.Tensor], ties: float = 0.0, rtol: float = 1e-5
) -> None:
    """`ties`: the share of values that may be off, by a step between two codes."""
    state = found.state_dict()
    for name in expected.keys() & found.weights.keys():
        values, other = state[name][...].float(), expected[name].float()
        assert values.shape == other.shape
        off = (values - other).abs() > rtol * other.abs() + 1e-7
        assert off.float().mean() <= ties, f"{name}: {off.float().mean():.4f}"


class TestModelOpt:
    """nvidia-modelopt, by export_hf_checkpoint."""

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("modelopt.torch.quantization")

    def export(self, model: Any, name: str, folder: Path, caches: str | None = None) -> None:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant

        config = getattr(mtq, name)
        if caches is not None:
            config = update_quant_cfg_with_kv_cache_quant(config, getattr(mtq, caches)["quant_cfg"])
        samples = [torch.randint(0, SIZES["vocab_size"], (2, 16)) for _ in range(2)]

        def forward(model: Any) -> None:
            for ids in samples:
                model(ids)

        self.quantized = mtq.quantize(model, config, forward)
        self.simulated = self.values(self.quantized)
        export_hf_checkpoint(self.quantized, export_dir=folder)

    @staticmethod
    def values(model: Any) -> dict[str, torch.Tensor]:
        """What its simulation multiplies by, where a CPU can simulate it."""
        found = {}
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                try:
                    found[f"{name}.weight"] = module.weight_quantizer(module.weight).detach()
                except (AssertionError, RuntimeError):  # "must be a CUDA tensor", "CUDA is not available"
                    return {}
        return found

    @pytest.mark.parametrize(
        ("name", "form"),
        [
            ("FP8_DEFAULT_CFG", "FP8"),
            ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8"),
            ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "FP8"),
            ("INT8_DEFAULT_CFG", "INT8"),
            ("INT8_WEIGHT_ONLY_CFG", "INT8"),
            ("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "INT4 (ModelOpt)"),
        ],
    )
    def test_what_it_simulates(self, name: str, form: str, seed: int, tmp_path: Path) -> None:
        self.export(llama(seed), name, tmp_path)
        found = read(tmp_path)
        assert set(found.formats) == {form}
        assert set(self.simulated) == set(found.weights)
        if "2D" in name:  # the export gives queries, keys and values one scale, where they have one each
            self.simulated = {key: value for key, value in self.simulated.items() if ".mlp." in key}
        # The simulation multiplies by 1 / scale, where the export divides by the scale.
        assert_values(found, self.simulated, ties=0.005)

    @pytest.mark.parametrize("name", ["INT8_SMOOTHQUANT_CFG", "INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG"])
    def test_factors_of_channels(self, name: str, seed: int, tmp_path: Path) -> None:
        """Which the library moves into norms, and makes the same for linears of one input: outputs stay close alone."""
        model, ids = llama(seed), torch.arange(12)[None]
        with torch.no_grad():
            original = model(ids).logits
        self.export(model, name, tmp_path)
        found = read(tmp_path)
        plain = llama(seed + 1)
        state = {key: value[...].reshape(plain.state_dict()[key].shape) for key, value in found.state_dict().items()}
        plain.load_state_dict(state)
        with torch.no_grad():
            logits = plain(ids).logits
        # Of four bits and random weights: 0.986 to 0.995 in twelve draws.
        assert torch.cosine_similarity(original.flatten(), logits.flatten(), 0) > 0.97

    @pytest.mark.parametrize(
        ("name", "form"),
        [
            ("NVFP4_DEFAULT_CFG", "NVFP4"),
            ("W4A16_NVFP4_CFG", "NVFP4"),
            ("W4A8_NVFP4_FP8_CFG", "FP4 in blocks of 32"),
            ("MXFP4_DEFAULT_CFG", "MXFP4"),
            ("MXFP8_DEFAULT_CFG", "FP8"),
        ],
    )
    def test_what_it_dequantizes(self, name: str, form: str, seed: int, tmp_path: Path) -> None:
        from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

        model = llama(seed)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.export(model, name, tmp_path)
        found, stored = read(tmp_path), load_file(tmp_path / "model.safetensors")
        assert set(found.formats) == {form}
        expected = {}
        for key in found.weights:
            packed, scale, shape = stored[key], stored[f"{key}_scale"], shapes[key]
            of, more = NVFP4QTensor, {"double_scale": stored.get(f"{key}_scale_2")}
            if form.startswith("MX") or form == "FP8":
                of, more = (MXFP4QTensor, {}) if form == "MXFP4" else (MXFP8QTensor, {})
            block = shape[-1] // scale.shape[-1]
            tensor = of(shape, torch.float32, packed)
            expected[key] = tensor.dequantize(torch.float32, scale=scale, block_sizes={-1: block}, **more).reshape(
                shape
            )
        assert_values(found, expected)

    @pytest.mark.parametrize(
        ("caches", "form"),
        [("FP8_KV_CFG", "FP8"), ("NVFP4_KV_CFG", "NVFP4"), ("FP8_AFFINE_KV_CFG", "numbers with biases")],
    )
    def test_caches(self, caches: str, form: str, seed: int, tmp_path: Path) -> None:
        self.export(llama(seed), "NVFP4_DEFAULT_CFG", tmp_path, caches)
        found, stored = read(tmp_path), load_file(tmp_path / "model.safetensors")
        assert found.cache_format == form
        assert {of: float(scale) for (_, of), scale in found.cache_scales.items()} == {
            of: float(stored[f"{LAYER}self_attn.{of}_proj.{of}_scale"]) for of in "kv"
        }


class TestCompressedTensors:
    """llmcompressor's oneshot without data, written by compressed-tensors, which decompresses it again."""

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("compressed_tensors")
        pytest.importorskip("llmcompressor")

    @pytest.mark.parametrize(
        ("scheme", "form"),
        [
            ("NVFP4A16", "NVFP4"),
            ("MXFP4A16", "MXFP4"),
            ("FP8_DYNAMIC", "FP8"),
            ("FP8_BLOCK", "FP8"),
            ("W8A8", "INT8"),
            ("W4A16", "INT4 (pack-quantized)"),
            ("W4A16_ASYM", "INT4 (pack-quantized)"),
            ("W8A16", "INT8 (pack-quantized)"),
            ("W3A16", "INT3 (pack-quantized)"),
            ("MXFP8A16", "FP8"),
        ],
    )
    def test_what_it_decompresses(self, scheme: str, form: str, seed: int, tmp_path: Path) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        llama(seed).save_pretrained(tmp_path / "original")  # the library reads its configuration again
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original")
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe, processor=object())  # which it would look for on a hub
        model.save_pretrained(tmp_path / "quantized", save_compressed=True)
        found = read(tmp_path / "quantized")
        assert set(found.formats) == {form}
        config = transformers.CompressedTensorsConfig(run_compressed=False)
        own = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "quantized", dtype=torch.float32, quantization_config=config
        )
        # The library works NVFP4 out in bfloat16.
        assert_values(found, dict(own.state_dict()), rtol=1e-2 if scheme == "NVFP4A16" else 1e-5)


class TestTorchAO:
    """torchao's tensors, flattened as its safetensors are."""

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("torchao.prototype.safetensors.safetensors_support")

    def saved(self, name: str, folder: Path, seed: int, **options: Any) -> Any:
        from torchao import quantization
        from torchao.prototype import mx_formats
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        model = llama(seed)
        config = getattr(quantization, name, None) or getattr(mx_formats, name)
        quantization.quantize_(
            model,
            config(**options),
            lambda module, path: isinstance(module, torch.nn.Linear) and path.endswith("_proj"),
        )
        tensors, metadata = flatten_tensor_state_dict(model.state_dict())
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", metadata)
        stated = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
        (folder / "config.json").write_text(json.dumps(stated))
        return model

    @pytest.mark.parametrize(
        ("name", "form", "options"),
        [
            ("Float8WeightOnlyConfig", "FP8", {}),
            ("Int8WeightOnlyConfig", "INT8", {"version": 2}),
            ("IntxWeightOnlyConfig", "INT8", {"weight_dtype": torch.int4}),
        ],
    )
    def test_what_it_dequantizes(
        self, name: str, form: str, options: dict[str, Any], seed: int, tmp_path: Path
    ) -> None:
        model = self.saved(name, tmp_path, seed, **options)
        found = read(tmp_path)
        assert set(found.formats) == {form}
        state = {key: value.dequantize() for key, value in model.state_dict().items() if key.endswith("_proj.weight")}
        assert_values(found, state)


class TestLayers:
    """Libraries that quantize models with a GPU alone pack single layers on a CPU."""

    N, K, GROUP = 64, 128, 32
    MODULE = f"{LAYER}mlp.up_proj."

    def check(
        self,
        stored: dict[str, torch.Tensor],
        config: dict[str, Any],
        expected: torch.Tensor,
        folder: Path,
        rtol: float = 1e-5,
    ) -> None:
        save_file(
            {self.MODULE + key: tensor.contiguous() for key, tensor in stored.items()}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
        assert_values(read(folder), {f"{self.MODULE}weight": expected}, rtol=rtol)

    def linear(self, seed: int) -> torch.nn.Linear:
        torch.manual_seed(seed)
        return torch.nn.Linear(self.K, self.N, bias=False).requires_grad_(False)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """And zero points, of rows and groups."""
        shape = (self.N, self.K // self.GROUP)
        return (torch.rand(shape) * 0.01 + 0.01).half(), torch.randint(1, 15, shape).float()

    @pytest.mark.parametrize("act_order", [False, True])
    def test_gptqmodel(self, act_order: bool, seed: int, tmp_path: Path) -> None:
        pytest.importorskip("gptqmodel")
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear

        linear, (scales, zeros) = self.linear(seed), self.scales()
        groups = torch.arange(self.K) // self.GROUP
        groups = groups[torch.randperm(self.K)] if act_order else groups
        packed = TorchLinear(4, self.GROUP, False, act_order, self.K, self.N)
        packed.pack_original(linear, scales.float(), zeros, groups.int())
        expected = packed.dequantize_weight().T
        stored = {key: tensor for key, tensor in packed.state_dict().items() if key != "bias"}
        # In memory it holds zero points as they are.
        config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
        self.check(stored, config, expected, tmp_path, rtol=2e-3)  # the library works it out in float16

    def test_autoawq(self, seed: int, tmp_path: Path) -> None:
        pytest.importorskip("awq.modules.linear.gemm")
        from awq.modules.linear.gemm import WQLinear_GEMM
        from awq.utils.packing_utils import dequantize_gemm

        linear, (scales, zeros) = self.linear(seed), self.scales()
        packed = WQLinear_GEMM.from_linear(
            linear, 4, self.GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        stored = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
        expected = dequantize_gemm(*stored.values(), 4, self.GROUP).T
        self.check(stored, {"quant_method": "awq", "bits": 4, "version": "gemm"}, expected, tmp_path, rtol=2e-3)

    @pytest.mark.parametrize("kind", ["nf4", "fp4"])
    def test_bitsandbytes(self, kind: str, seed: int, tmp_path: Path) -> None:
        functional = pytest.importorskip("bitsandbytes.functional")
        packed, state = functional.quantize_4bit(self.linear(seed).weight, quant_type=kind, compress_statistics=True)
        stored = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
        expected = functional.dequantize_4bit(packed, state)
        self.check(stored, {"quant_method": "bitsandbytes", "load_in_4bit": True}, expected, tmp_path)
