"""An autoencoder as an ONNX file of its own, tiny and with random weights: its engine, and what diffusers computes."""

from pathlib import Path

import pytest
import torch
from exact_weights import built, in_four_bits

pytest.importorskip("diffusers")

import diffusers

from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.common.metrics import relative_error


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.autoencoder = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=16,
        )

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.autoencoder.decode(latents, return_dict=False)[0]
        return found


@pytest.mark.slow
def test_an_onnx_file_of_a_decoder_of_pictures(tmp_path: Path, seed: int) -> None:
    """Its linears are plugin layers, and what the engine was built of computes what diffusers does."""
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    torch.manual_seed(seed)
    model = Decoder().eval()
    in_four_bits(model)
    latents = torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        expected = model(latents).numpy()
    path = tmp_path / "m.onnx"
    torch.onnx.export(model, (latents,), path, dynamo=True, input_names=["latents"], opset_version=21)
    (found,) = session(built(path, tmp_path, least=2)).run(None, {"latents": latents.numpy()})
    assert relative_error(found=[found], expected=[expected]) < 1e-4
