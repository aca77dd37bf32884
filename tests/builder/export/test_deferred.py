"""Deferred tensors are what they are read as, however they are arranged, and read no more than is asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trt_nvfp4.builder.export.deferred import DeferredTensor, deferred_weights, read_small, replace_weight


class Files:
    """Tensors, and the numbers of those that were read, in order."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.tensors = [torch.randn(shape) for shape in shapes]
        self.read: list[int] = []

    def deferred(self) -> list[DeferredTensor]:
        return [DeferredTensor.of(t.shape, t.dtype, lambda number=number: self._read(number)) for number, t in self]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(enumerate(self.tensors))

    def _read(self, number: int) -> torch.Tensor:
        self.read.append(number)
        return self.tensors[number]


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """As transformers puts the gates and ups of experts together."""
    half = len(parts) // 2
    whole = torch.cat([torch.stack(parts[:half]), torch.stack(parts[half:])], dim=1)
    return whole.to(torch.bfloat16).contiguous()


ARRANGEMENTS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "stacked": stacked,
    "transposed": lambda parts: stacked(parts).transpose(1, 2),
    "permuted": lambda parts: stacked(parts).permute(0, -1, 1),
    "joined": lambda parts: torch.cat(parts, dim=0),
    "cut": lambda parts: torch.cat(parts, dim=-1).chunk(2, dim=-1)[1],
    "viewed": lambda parts: parts[0].view(2, 2, -1).transpose(0, 1).reshape(4, -1),
    "cast": lambda parts: parts[0].half().float().T,
    "sliced": lambda parts: parts[0][1:3, ::2].unsqueeze(0).expand(2, -1, -1),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements(name: str) -> None:
    files = Files(*[(4, 6)] * 6)
    expected = ARRANGEMENTS[name](files.tensors)
    found = ARRANGEMENTS[name](list(files.deferred()))
    assert isinstance(found, DeferredTensor)
    assert not files.read
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(found.read(), expected)
    for index in range(len(expected)):
        assert torch.equal(found.part(index), expected[index])


@pytest.mark.parametrize("name", ["stacked", "transposed", "permuted"])
def test_a_part_of_a_stack_reads_what_it_is_made_of(name: str) -> None:
    files = Files(*[(4, 6)] * 6)
    found, expected = ARRANGEMENTS[name](list(files.deferred())), ARRANGEMENTS[name](files.tensors)
    assert isinstance(found, DeferredTensor)
    found.part(1)
    assert files.read == [1, 4]
    chosen = torch.tensor([[2, 0], [2, 2]])
    assert torch.equal(found[chosen], expected[chosen])
    assert sorted(files.read) == [0, 1, 2, 3, 4, 5]
    files.read.clear()
    none = torch.tensor([], dtype=torch.int64)  # of an expert that no token goes to
    assert torch.equal(found[none], expected[none])
    assert not files.read


def test_modules_compute_with_them() -> None:
    files = Files((5, 3), (1000, 3))
    head, table = (torch.nn.Parameter(tensor) for tensor in files.deferred())
    linear, embedding = torch.nn.Linear(3, 5, bias=False), torch.nn.Embedding(1000, 3)
    linear.weight, embedding.weight = head, table
    both = torch.nn.Sequential(embedding, linear)
    ids = torch.tensor([7, 999])
    expected = files.tensors[1][ids] @ files.tensors[0].T
    with torch.no_grad():
        torch.testing.assert_close(both(ids), expected)
        replace_weight(both, head, torch.nn.Parameter(torch.zeros(5, 3)))
        assert not both(ids).any()
    files.read.clear()
    read_small(both)
    assert files.read == [1]
    assert torch.equal(embedding.weight, files.tensors[1])


def test_a_weight_that_is_read_from_a_file_does_not_change() -> None:
    (weight,) = Files((2, 2)).deferred()
    with pytest.raises(NotImplementedError, match="in place"):
        weight.zero_()
    with pytest.raises(NotImplementedError, match="in place"):
        torch.add(torch.ones(2, 2), 1, out=weight)


def test_other_tensors_change_in_place_by_a_weight() -> None:
    files = Files((2, 2))
    (weight,) = files.deferred()
    found = torch.ones(2, 2)
    found += weight
    assert torch.equal(found, 1 + files.tensors[0])


@pytest.mark.parametrize("name", ["YoutuForCausalLM", "ZayaForCausalLM"])
def test_weights_that_their_initialization_changes_in_place(tmp_path: Path, name: str) -> None:
    """Such models are loaded whole."""
    transformers = pytest.importorskip("transformers")
    from onnx_models.any_causal_lm import made
    from trt_nvfp4.builder.export.loading import load_directory

    model = made(name)
    model.save_pretrained(tmp_path)
    loaded = load_directory(tmp_path, transformers, trust_remote_code=False).model
    assert not any(deferred_weights(loaded))
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected = type(model).from_pretrained(tmp_path)(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
