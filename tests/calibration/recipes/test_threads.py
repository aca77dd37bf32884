"""Quantizing on several threads: the same bits in the same order, and an error where there is one."""

import threading
from collections.abc import Iterator

import pytest
import torch

from trt_nvfp4.calibration import recipes
from trt_nvfp4.calibration.recipes import quantizer
from trt_nvfp4.calibration.recipes.threads import side_by_side
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """Whatever the machine and its environment allow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)


def test_in_order_and_beside_one_another() -> None:
    together = threading.Barrier(3, timeout=20)

    def work(part: int) -> tuple[int, int]:
        together.wait()  # breaks unless three are at work at once
        return part, torch.get_num_threads()

    assert side_by_side(work, range(6)) == [(part, 1) for part in range(6)]
    assert side_by_side(work, []) == []


def test_an_error_of_one_part() -> None:
    def work(part: int) -> int:
        if part == 2:
            raise ValueError("part 2")
        return part

    with pytest.raises(ValueError, match="part 2"):
        side_by_side(work, range(5))


@pytest.mark.parametrize("recipe", ["max", "four-over-six", "mse", "diagonal", "local-hessian", "mse+gptq"])
def test_the_same_bits_by_any_number_of_threads(recipe: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(70, 192, generator=generator)
    inputs = InputStatistics.of_rows(torch.randn(50, 192, generator=generator), recipes.parse(recipe).needs)
    whole = recipes.quantize_weight(weight, recipe, inputs)
    monkeypatch.setattr(quantizer, "_CPU_PART", 192 * 9)  # eight parts, the last one smaller
    for threads in (3, 1):
        torch.set_num_threads(threads)
        parts = recipes.quantize_weight(weight, recipe, inputs)
        assert (parts.packed == whole.packed).all()
        assert (parts.block_scales.view(torch.uint8) == whole.block_scales.view(torch.uint8)).all()
        assert parts.tensor_scale == whole.tensor_scale
    torch.set_num_threads(3)
