"""External data: regular files of the model's own folder only, of which links may be followed."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from trt_nvfp4.common.external_data import external_files, follow_links, inside, tensors


def test_onnxruntime_reads_through_links(tmp_path: Path, seed: int) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Add(x, w) }'
    )
    w = np.random.default_rng(seed).random(2, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    snapshot = tmp_path / "snapshots" / "1"
    for folder in (tmp_path / "blobs", snapshot):
        folder.mkdir(parents=True)
    onnx.save(model, tmp_path / "blobs" / "a", save_as_external_data=True, location="w.data", size_threshold=0)
    (tmp_path / "blobs" / "w.data").rename(tmp_path / "blobs" / "b")
    for name, blob in (("model.onnx", "a"), ("w.data", "b")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")

    linked = onnx.load(snapshot / "model.onnx", load_external_data=False)
    folder = follow_links(linked, snapshot)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = onnxruntime.InferenceSession(linked.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(y, 1 + w)


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "/etc/hostname", "/dev/zero", "folder", "pipe", "link", "device", "up/secret"),
        *("circle", "circle/x", "circle/x/y", "a\0b"),
    ],
)
def test_refused_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    for link, target in (("link", "../secret"), ("device", "/dev/zero"), ("up", ".."), ("circle", "circle")):
        (folder / link).symlink_to(target)
    with pytest.raises(ValueError, match=r"outside the model's folder|regular file|cannot be resolved"):
        inside(folder, name)


def test_names_that_are_taken(tmp_path: Path) -> None:
    """A file, one that is missing, a link to a neighbour, and, in a Hugging Face cache alone, a link to its blobs."""
    snapshot = tmp_path / "models--a" / "snapshots" / "1"
    (snapshot / "sub").mkdir(parents=True)
    (tmp_path / "models--a" / "blobs").mkdir()
    for file in (
        snapshot / "w",
        snapshot / "sub" / "v",
        tmp_path / "models--a" / "blobs" / "5",
        tmp_path / "models--a" / "x",
    ):
        file.write_text(file.name)
    for link, target in (("near", "sub/v"), ("blob", "../../blobs/5"), ("far", "../../x")):
        (snapshot / link).symlink_to(target)
    assert [inside(snapshot, name).name for name in ("w", "none", "near", "blob")] == ["w", "none", "v", "5"]
    with pytest.raises(ValueError, match="outside the model's folder"):
        inside(snapshot, "far")


def test_every_tensor_is_looked_at(tmp_path: Path) -> None:
    """In attributes, whatever type they state, bodies, functions and sparse initializers, too."""

    def outside(name: str) -> onnx.TensorProto:
        tensor = onnx.TensorProto(name=name, data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="../secret")
        return tensor

    def node(name: str) -> onnx.NodeProto:
        made = onnx.helper.make_node("Constant", [], [name], value=outside(name))
        made.attribute[0].type = onnx.AttributeProto.UNDEFINED
        return made

    body = onnx.helper.make_graph([node("body")], "b", [], [], [outside("inner")])
    branch = onnx.helper.make_node("If", ["c"], ["y"], then_branch=body)
    branch.attribute[0].type = onnx.AttributeProto.UNDEFINED
    sparse = onnx.SparseTensorProto(values=outside("sparse"), indices=outside("indices"))
    graph = onnx.helper.make_graph(
        [node("main"), branch], "g", [], [], [outside("weight")], sparse_initializer=[sparse]
    )
    function = onnx.helper.make_function(
        "of.mine", "F", [], ["y"], [node("function")], [onnx.helper.make_opsetid("", 21)]
    )
    model = onnx.helper.make_model(graph, functions=[function])
    found = {tensor.name for tensor in tensors(model) if tensor.external_data}
    assert found == {"body", "inner", "sparse", "indices", "main", "weight", "function"}
    with pytest.raises(ValueError, match="outside the model's folder"):
        external_files(model, tmp_path)
