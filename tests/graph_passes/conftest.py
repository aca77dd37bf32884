"""Loading a model that is made in memory."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from trt_nvfp4.graph_passes.load.source import SourceModel, load


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[onnx.ModelProto], SourceModel]:
    """Saves a model and loads it as the passes do."""

    def load_model(model: onnx.ModelProto) -> SourceModel:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return load(path)

    return load_model
