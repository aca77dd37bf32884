"""Experts are found by their number, however a checkpoint spells them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint_formats.writers import FORMATS
from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint
from trt_nvfp4.calibration.checkpoint_files import CheckpointFiles
from trt_nvfp4.common.errors import CalibrationError

EXPERTS, PREFIX = 3, "model.layers.1.mlp.experts."
Tensors = dict[str, torch.Tensor]
SPELLINGS: dict[str, Callable[[str, list[Tensors]], Tensors]] = {
    "the number in front": lambda name, each: {
        f"{number}.{name}.{role}": tensor for number, one in enumerate(each) for role, tensor in one.items()
    },
    "the number behind": lambda name, each: {
        f"{name}.{number}.{role}": tensor for number, one in enumerate(each) for role, tensor in one.items()
    },
    "a stack": lambda name, each: {f"{name}.{role}": torch.stack([one[role] for one in each]) for role in each[0]},
    "rows below each other": lambda name, each: {
        f"{name}.{role}": torch.cat([torch.atleast_1d(one[role]) for one in each]) for role in each[0]
    },
    "a scale for all": lambda name, each: {
        f"{name}.{role}": each[0][role] if "scale_2" in role or "global" in role else torch.cat([t[role] for t in each])
        for role in each[0]
        if "input" not in role
    },
}


@pytest.mark.parametrize("format_", ["nvfp4 modelopt", "nvfp4 compressed-tensors"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_experts(spelling: str, format_: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    each = [FORMATS[format_][0](rng, 48, 64)[0] for _ in range(EXPERTS)]
    tensors = SPELLINGS[spelling]("gate_proj", each)
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_local_experts": EXPERTS}}))
    files, checkpoint = CheckpointFiles(tmp_path), NVFP4Checkpoint(tmp_path)
    assert len(files) == len(set(files)) == EXPERTS * len({name.rpartition(".")[2] for name in tensors})
    for number, one in enumerate(each):
        module = f"{PREFIX}{number}.gate_proj"
        for name in (name for name in files if name.startswith(f"{module}.")):
            expected = one[name.removeprefix(f"{module}.")]
            torch.testing.assert_close(files.read(name).reshape(expected.shape), expected, rtol=0, atol=0)
            assert files.shape(name) == tuple(files.read(name).shape)
            assert files.dtype(name) == files.dtype(f"{PREFIX}0.gate_proj.{name.rpartition('.')[2]}")
        values = next(name for name in ("weight", "weight_packed") if name in one)
        rows = checkpoint.rows(module, slice(5, 9))
        assert torch.equal(rows.packed, one[values][5:9])
        assert torch.equal(rows.block_scales, one["weight_scale"][5:9])
        assert checkpoint.shape(module) == (48, 64)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"up_proj.weight": torch.zeros(9, 4)}, {}, "states no number of experts"),
        ({"up_proj.weight": torch.zeros(10, 4)}, {"num_experts": 3}, "same for each of 3 experts, found .10, 4"),
        ({"w1.weight": torch.zeros(3, 2, 4), "w1.weight_scale": torch.zeros(2, 2)}, {}, "3 experts, found .2, 2"),
    ],
)
def test_stacks_that_do_not_fit(tensors: Tensors, config: dict[str, int], message: str, tmp_path: Path) -> None:
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CalibrationError, match=message):
        CheckpointFiles(tmp_path)


def test_quarks_names(tmp_path: Path) -> None:
    tensors = {
        "a.input_scale_2": torch.ones(1),
        "b.weight_quantizer.scale": torch.ones(2),
        "c.input_scale": torch.ones(3),
    }
    tensors["c.input_scale_2"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    assert set(files) == {"a.input_scale", "b.weight_scale", "c.input_scale", "c.input_scale_2"}
    assert files.read("b.weight_scale").shape == (2,)
