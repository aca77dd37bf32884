"""Python code in a Hugging Face directory runs only where the user says so: never by default, nor on a prompt."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.calibration.samples.samples import InputSpec, load_samples
from trt_nvfp4.common.errors import CalibrationError

transformers = pytest.importorskip("transformers")

MODEL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizer
Path({marker!r}).touch()
class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{}}
    model_input_names = ["input_ids"]
    @property
    def vocab_size(self): return 100
    def get_vocab(self): return {{chr(97 + i): i for i in range(26)}}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return ord(token) - 97
    def _convert_id_to_token(self, index): return chr(97 + index)
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the directory's code makes when it runs. A prompt would be answered with yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path, str(modules)])
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "ran"


def own_model(folder: Path, marker: Path) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=100, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    (folder / "own_code.py").write_text(MODEL.format(marker=str(marker)))
    stated = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    stated |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": places}
    (folder / "config.json").write_text(json.dumps(stated))
    return model


def test_a_models_code_does_not_run(tmp_path: Path, marker: Path) -> None:
    own_model(tmp_path / "model", marker)
    with pytest.raises(ModelFaultError, match="--trust-remote-code"):
        export.export(tmp_path / "model", tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="trust_remote_code"):
        export.longest_sequence(tmp_path / "model")
    assert not marker.exists()


def test_a_models_code_runs_where_it_is_trusted(tmp_path: Path, marker: Path) -> None:
    model = own_model(tmp_path / "model", marker)
    assert export.longest_sequence(tmp_path / "model", trust_remote_code=True) == 64
    path = export.export(tmp_path / "model", tmp_path / "m.onnx", trust_remote_code=True)
    assert marker.exists()
    ids = torch.randint(0, 100, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((2, 7), np.int64)}
    (actual,) = onnxruntime.InferenceSession(path).run(None, feeds)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_a_tokenizers_code(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own_code.py").write_text(TOKENIZER.format(marker=str(marker)))
    stated = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_code.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "config.json").write_text('{"max_position_embeddings": 4}')
    (tmp_path / "text.txt").write_text("abcdefghij")
    specs = {"input_ids": InputSpec(("batch", "sequence"), np.dtype(np.int64))}
    with pytest.raises(CalibrationError, match="--trust-remote-code"):
        load_samples(tmp_path / "text.txt", specs, folder)
    assert not marker.exists()
    samples = list(load_samples(tmp_path / "text.txt", specs, folder, trust_remote_code=True))
    assert marker.exists()
    # Python tokenizers cut nothing into pieces themselves.
    assert [sample["input_ids"].tolist() for sample in samples] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]
