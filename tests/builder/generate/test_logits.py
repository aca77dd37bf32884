"""What is chosen from logits in Torch is what NumPy chooses from them."""

import numpy as np
import pytest
import torch

from trt_nvfp4.builder.generate.logits import HostLogits
from trt_nvfp4.builder.generate.torch_logits import TorchLogits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 40, None])
def test_the_likeliest_are_those_of_the_host_with_many_equal_logits(
    rng: np.random.Generator, device: str, dtype: torch.dtype, count: int | None
) -> None:
    values = torch.from_numpy(rng.standard_normal((3, 4, 5000)) * 4).to(device, dtype)  # bfloat16: hundreds are equal
    values[0, 2, 7:9] = 0.0
    values[0, 2, 8] = -0.0
    rows = np.array([[1, 2], [0, 0], [2, 3]])
    logits = TorchLogits.of_tokens(values, rows)
    last = np.take_along_axis(values.float().cpu().numpy(), rows[..., None], 1).reshape(6, -1)
    assert (logits.host() == last).all()
    found, expected = logits.likeliest(count), HostLogits(last).likeliest(count)
    assert (found.ids == expected.ids).all()
    assert (found.values == expected.values).all()
    assert (found.ids.dtype, found.values.dtype) == (np.int64, np.float32)
    assert found.finite.all()
    assert (logits.rows([5, 0]).rows([1]).host() == last[[0]]).all()
    repeated = np.array([[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 2]])  # as many as there are, of shorter sequences
    last = np.take_along_axis(values.float().cpu().numpy(), repeated[..., None], 1).reshape(12, -1)
    assert (TorchLogits.of_tokens(values, repeated).host() == last).all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_seen_wherever_they_stand(count: int, wrong: float) -> None:
    values = torch.arange(20.0).reshape(2, 1, 10)
    values[1, 0, 4] = wrong
    for logits in (TorchLogits(values[:, 0]), HostLogits(values[:, 0].numpy())):
        assert logits.likeliest(count).finite.tolist() == [True, False]


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    logits = TorchLogits(torch.tensor([[1.0, 3.0, 2.0]]))
    assert logits.likeliest(50).ids.tolist() == [[1, 2, 0]]
