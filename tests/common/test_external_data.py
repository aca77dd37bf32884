"""Linked external data: ONNX Runtime reads a model in memory under the names that were found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from trt_nvfp4.common.external_data import follow_links


def test_onnxruntime_reads_through_links(tmp_path: Path, seed: int) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Add(x, w) }'
    )
    w = np.random.default_rng(seed).random(2, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    onnx.save(model, tmp_path / "blobs" / "a", save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "blobs" / "w.data").rename(tmp_path / "blobs" / "b")
    for name, blob in (("model.onnx", "a"), ("w.data", "b")):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{blob}")

    linked = onnx.load(tmp_path / "snapshot" / "model.onnx", load_external_data=False)
    folder = follow_links(linked, tmp_path / "snapshot")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = onnxruntime.InferenceSession(linked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(y, 1 + w)
