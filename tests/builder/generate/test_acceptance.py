"""accept.py of a bundle: a right engine is accepted; a wrong one, a missing GPU and a step that fails are reported."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_nvfp4.builder.errors import VERIFICATION_FAILED, ModelFaultError, UsageError, VerificationError
from trt_nvfp4.builder.generate import acceptance
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.torch_runner import TorchRunner
from trt_nvfp4.builder.records.bundle import ACCEPT_SCRIPT


def test_what_was_recorded_is_compared(tiny_of: Callable[..., Any], tmp_path: Path) -> None:
    tiny = tiny_of(capacity=32)
    model, file = tiny.save(tmp_path / "model.onnx"), tmp_path / "reference.npz"
    acceptance.record(OnnxRunner(model), file)
    found = acceptance.compare(TorchRunner(model, "cpu"), file)
    assert found["equal_tokens"] == 1
    assert found["kl"] < 1e-4
    tiny.weights["wo"] *= -1
    with pytest.raises(VerificationError, match="expected at most"):
        acceptance.compare(OnnxRunner(tiny.save(tmp_path / "other.onnx")), file)
    tiny.weights["wo"] *= np.nan
    with pytest.raises(VerificationError, match="NaN"):
        acceptance.compare(OnnxRunner(tiny.save(tmp_path / "other.onnx")), file)
    file.write_bytes(b"PK")
    with pytest.raises(ModelFaultError, match="not a recorded reference"):
        acceptance.compare(OnnxRunner(model), file)
    with pytest.raises(UsageError, match="too short"):
        acceptance.record(OnnxRunner(tiny_of(capacity=16).save(tmp_path / "short.onnx")), file)


@pytest.mark.parametrize(
    ("compare", "state", "steps"),
    [
        ("print('noise'); print('{\"kl\": 0.001}')", "passed", ["build", "compare", "speed"]),
        ("print('error: KL 3', file=sys.stderr); sys.exit(5)", "failed", ["build", "compare"]),
        ("import os; os.abort()", "crashed", ["build", "compare"]),
        ("import time; time.sleep(100)", "timed out", ["build", "compare"]),
    ],
)
def test_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compare: str,
    state: str,
    steps: list[str],
) -> None:
    (tmp_path / "build_engine.py").write_text("print('model.engine: built as planned')")
    (tmp_path / ACCEPT_SCRIPT).write_text(
        f"import sys\nif 'speed' in sys.argv:\n    print('{{}}')\nelse:\n    {compare}\n"
    )
    monkeypatch.setattr(sys, "argv", ["accept.py"])
    monkeypatch.setattr(acceptance, "LIMITS", {"build": 60, "compare": 2, "speed": 60})
    code = acceptance.main(tmp_path)
    assert code == (0 if state == "passed" else VERIFICATION_FAILED)
    written = json.loads((tmp_path / acceptance.RESULT).read_text())
    assert list(written["steps"]) == steps
    assert written["steps"]["compare"]["state"] == state
    assert written["steps"]["build"]["found"] == "model.engine: built as planned"
    shown = capsys.readouterr().out
    assert "passed    build: model.engine: built as planned\n" in shown
    assert f"{state:9} compare: " in shown
    assert "error: " not in shown
