"""ONNX files that are damaged where protobuf reads them all the same."""

from pathlib import Path

import onnx
import pytest
from onnx import parser

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.onnx_file import read


@pytest.mark.parametrize(("before", "after"), [(b"tensor_x", b"\xffensor_x"), (b"\x08\x01\x12", b"\x08\x53\x12")])
def test_inputs_of_no_name_or_type(before: bytes, after: bytes, tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3] tensor_x) => (float[3] y) {y = Abs(tensor_x)}'
    )
    path = tmp_path / "m.onnx"
    content = model.SerializeToString()
    assert before in content
    path.write_bytes(content.replace(before, after))
    onnx.load(path)
    with pytest.raises(ModelFaultError, match=r"m\.onnx: not an ONNX file, or a damaged one"):
        read(path)
