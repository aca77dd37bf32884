"""A LoRA adapter merges as PEFT merges it; what cannot be merged is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.huggingface import load_model

transformers = pytest.importorskip("transformers")


def base(folder: Path, kind: str = "llama", hidden: int = 32) -> Path:
    """A directory of a language model; "tied": its head is the embedding, "biased": its linears have biases."""
    if kind == "gpt2":  # its linears hold inputs first
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=hidden, vocab_size=48))
    else:
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 48}
        sizes |= {"tie_word_embeddings": kind == "tied", "attention_bias": kind == "biased"}
        config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=64, **sizes)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def saved_adapter(directory: Path, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Saves an adapter with random weights; returns the state dict that peft merges it to."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name or "modules_to_save" in name or parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) / 4)
    tuned.save_pretrained(folder)
    # As loaded: what is saved is what counts.
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    merged: dict[str, torch.Tensor] = peft.PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
    return merged


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {"r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
    "ranks by layer, rslora": (
        "llama",
        {
            "r": 8,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": "all-linear",
            "rank_pattern": {r".*mlp\.up_proj": 3, "layers.0.self_attn.q_proj": 5},
            "alpha_pattern": {"^model.layers.0.mlp.*": 7, "v_proj": 2},
        },
    ),
    "trained biases": ("biased", {"r": 2, "target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "all biases": ("biased", {"r": 2, "target_modules": ["q_proj"], "bias": "all"}),
    "a norm and the embedding whole": (
        "llama",
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "embed_tokens"]},
    ),
    "a whole head that was tied": ("tied", {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied, and left alone": ("tied", {"r": 2, "target_modules": ["down_proj"]}),
    "the head": ("llama", {"r": 2, "target_modules": ["lm_head", "embed_tokens"]}),
    "inputs first, said wrongly": ("llama", {"r": 2, "target_modules": ["q_proj"], "fan_in_fan_out": True}),
    "inputs first, unsaid": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": False}),
    "no layers but one": ("llama", {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [0]}),
    "a trained beginning": ("llama", {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    "inputs first": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", KINDS)
def test_as_peft_merges(case: str, tmp_path: Path) -> None:
    kind, options = KINDS[case]
    directory = base(tmp_path / "base", kind)
    expected = saved_adapter(directory, tmp_path / "adapter", **options)
    plain = load_model(directory)[0].state_dict()
    model, _ = load_model(directory, adapter=Adapter(tmp_path / "adapter"))
    changed = 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
        changed += not torch.equal(value, plain[name])
    assert changed >= 1


@pytest.mark.parametrize("case", ["patterns", "the head", "a norm and the embedding whole"])
def test_names_of_a_trainings_own_checkpoint(case: str, tmp_path: Path) -> None:
    """Which hold the adapter's name, and the weights that whole ones replace."""
    directory, folder = base(tmp_path / "base"), tmp_path / "adapter"
    expected = saved_adapter(directory, folder, **KINDS[case][1])
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, last = name.rpartition(".")
        if "lora_" in name:
            name = f"{module}.default.weight" if last == "weight" else f"{name}.default"
        elif "base_layer" not in name:
            name = f"{module}.modules_to_save.default.{last}"
            tensors[f"{module}.original_module.{last}"] = torch.zeros(1)
        tensors[name] = tensor
    save_file(tensors, folder / "adapter_model.safetensors")
    model, _ = load_model(directory, adapter=Adapter(folder))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.fixture
def handmade(tmp_path: Path) -> Path:
    """An adapter of one module, written by hand."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.o_proj"
    tensors = {f"{prefix}.lora_A.weight": torch.randn(4, 32), f"{prefix}.lora_B.weight": torch.randn(32, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


def test_factor(handmade: Path, tmp_path: Path) -> None:
    directory = base(tmp_path / "base")
    before = load_model(directory)[0].state_dict()
    after = load_model(directory, adapter=Adapter.parse(f"{handmade}:0.5"))[0].state_dict()
    tensors = load_file(handmade / "adapter_model.safetensors")
    a, b = (next(t for name, t in tensors.items() if f"lora_{factor}" in name) for factor in "AB")
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(after[name], before[name] + 0.5 * 8 / 4 * b @ a)
    assert Adapter(handmade).modules() == {name.removesuffix(".weight")}


def test_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Adapter.parse("adapter:0.5").absolute() == Adapter(tmp_path / "adapter", 0.5)


@pytest.mark.parametrize("text", ["adapter:big", "adapter:inf", "adapter:"])
def test_factors_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number"):
        Adapter.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "its rank .* is 0"),
        ({"peft_type": "IA3"}, "peft_type .* is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"lora_alpha": "much"}, "must state lora_alpha"),
        ({"lora_alpha": 1e300}, "infinite or NaN"),
        ({"alpha_pattern": {"(.*)*x": 3}}, "pattern .* is not read here"),
        ({"alpha_pattern": {".*.*.*.*.*x": 3}}, "pattern .* is not read here"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str, handmade: Path, tmp_path: Path) -> None:
    file = handmade / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelFaultError, match=message):
        load_model(base(tmp_path / "base"), adapter=Adapter(handmade))


def test_another_base(handmade: Path, tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match=r"o_proj is \[64, 64\] in the model and \[32, 32\] in the adapter"):
        load_model(base(tmp_path / "base", hidden=64), adapter=Adapter(handmade))
    with pytest.raises(BuilderError, match="GPT2LMHeadModel does not have: it is of another model"):
        load_model(base(tmp_path / "gpt2", "gpt2"), adapter=Adapter(handmade))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "and no .*lora_B"),
        (lambda t: {k: v[:0] if "lora_A" in k else v[:, :0] for k, v in t.items()}, "factors of one rank"),
        (lambda t: {k.replace("o_proj", "x_proj"): v for k, v in t.items()}, "it changes .*x_proj"),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.zeros(3, 3)}, r"lm_head.weight is .* \[3, 3\] in the"),
        (
            lambda t: t | {"base_model.model.lm_head.weight": torch.zeros(50, 32)},
            r"with 2 tokens more; .*_embeddings\(50",
        ),
        (lambda t: t | {k.replace("A.w", "A.other.w"): v.clone() for k, v in t.items()}, "of two adapters"),
        (lambda t: t | {"base_model.model.lm_head.lora_magnitude_vector": torch.zeros(3)}, "not merged here"),
    ],
)
def test_weights_that_are_refused(change: Any, message: str, handmade: Path, tmp_path: Path) -> None:
    file = handmade / "adapter_model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file)
    with pytest.raises(ModelFaultError, match=message):
        load_model(base(tmp_path / "base"), adapter=Adapter(handmade))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_weight_of_two_modules(target: str, tmp_path: Path) -> None:
    """As trained, one of them changes; peft's merge changes both."""
    directory = base(tmp_path / "base", "tied")
    saved_adapter(directory, tmp_path / "adapter", r=2, target_modules=[target])
    with pytest.raises(BuilderError, match=r"which shares its weight with .* only one of them"):
        load_model(directory, adapter=Adapter(tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["use_dora", "use_qalora"])
def test_kinds_that_do_more_as_peft_saves_them(kind: str, tmp_path: Path) -> None:
    directory = base(tmp_path / "base")
    saved_adapter(directory, tmp_path / "adapter", r=2, target_modules=["q_proj"], **{kind: True})
    with pytest.raises(BuilderError, match=f"{kind} in adapter_config.json is not merged here; merge it with peft"):
        load_model(directory, adapter=Adapter(tmp_path / "adapter"))


def test_pickled_adapters(handmade: Path, tmp_path: Path) -> None:
    (handmade / "adapter_model.safetensors").rename(handmade / "adapter_model.bin")
    with pytest.raises(BuilderError, match="holds no adapter_model"):
        load_model(base(tmp_path / "base"), adapter=Adapter(handmade))
