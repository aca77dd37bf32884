"""The ComfyUI node against a stand-in of ComfyUI's interface: what its samplers call gives diffusers' result."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from tests.builder.components.diffusion.pipelines import FAMILIES, WIDTH, saved
from trt_nvfp4.builder.components.diffusion.runs import PictureOptions
from trt_nvfp4.builder.components.diffusion.source import of_pipeline
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.common.metrics import relative_error

NODE = Path(__file__).parents[2] / "examples" / "comfyui" / "__init__.py"
TEXT = 32


class BaseModel(torch.nn.Module):
    """Calls the network as ComfyUI's does."""

    diffusion_model: Any

    def apply_model(self, x: torch.Tensor, t: torch.Tensor, c_crossattn: torch.Tensor, **conds: Any) -> torch.Tensor:
        assert self.diffusion_model.dtype.is_floating_point
        options = {"control": None, "transformer_options": {}}
        found: torch.Tensor = self.diffusion_model(x, t, context=c_crossattn, **options, **conds)
        return found


class Config:
    def __init__(self, unet_config: dict[str, Any]) -> None:
        self.unet_config = dict(unet_config)

    def get_model(self, state_dict: dict[str, Any]) -> BaseModel:
        assert state_dict == {}
        assert self.unet_config["disable_unet_model_creation"]
        return BaseModel()


class ModelPatcher:
    def __init__(self, model: Any, load_device: Any, offload_device: Any) -> None:
        self.model, self.devices = model, (load_device, offload_device)
        assert not list(model.parameters())
        model.to(load_device)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    cpu = torch.device("cpu")
    modules = {
        "folder_paths": {"models_dir": str(tmp_path)},
        "comfy": {},
        "comfy.model_management": {"get_torch_device": lambda: cpu, "unet_offload_device": lambda: cpu},
        "comfy.model_patcher": {"ModelPatcher": ModelPatcher},
        "comfy.supported_models": dict.fromkeys(("Flux", "FluxSchnell", "SD3"), Config),
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    spec = importlib.util.spec_from_file_location("comfyui_node", NODE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def denoiser(name: str, folder: Path) -> Any:
    """The pipeline, and its denoiser below models/trt_nvfp4."""
    pipeline = saved(name, folder / name)
    source = of_pipeline(folder / name, PictureOptions.parse(FAMILIES[name][1], 1, FAMILIES[name][2]))
    built = folder / "trt_nvfp4" / "built"
    built.mkdir(parents=True)
    parts = [part.export(source.name, built) for part in source.parts if part.name == "transformer"]
    calls = {"transformer": source.settings["calls"]["transformer"]}
    Manifest(source.task, parts, [], {"calls": calls}, source.name).save(built)
    return pipeline


def of_flux(pipeline: Any, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    found = pipeline.transformer(
        hidden_states=pipeline._pack_latents(x, batch, channels, height, width),
        timestep=t,
        guidance=torch.full((batch,), 3.5),
        pooled_projections=y,
        encoder_hidden_states=context,
        txt_ids=torch.zeros(context.shape[1], 3),
        img_ids=pipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", x.dtype),
    ).sample
    scale = pipeline.vae_scale_factor
    unpacked: torch.Tensor = pipeline._unpack_latents(found, height * scale, width * scale, scale)
    return unpacked


def of_sd3(pipeline: Any, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = pipeline.transformer(
        hidden_states=x, timestep=t, encoder_hidden_states=context, pooled_projections=y
    ).sample
    return found


FLUX = SimpleNamespace(family="flux", of=of_flux, text=WIDTH, pooled=WIDTH, t=0.7, conds={"guidance": 3.5})
SD3 = SimpleNamespace(family="sd3", of=of_sd3, text=2 * WIDTH, pooled=2 * WIDTH, t=700.0, conds={})


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "case"), [("flux_dev", FLUX), ("sd3", SD3)])
def test_samplers_get_diffusers_result(model_type: str, case: Any, node: ModuleType, tmp_path: Path, seed: int) -> None:
    """In a batch larger than the engine's, too."""
    pipeline = denoiser(case.family, tmp_path)
    loader = node.NODE_CLASS_MAPPINGS["NVFP4DenoiserLoader"]
    folders, types = (entry[0] for entry in loader.INPUT_TYPES()["required"].values())
    assert folders == ["built"]
    assert model_type in types
    assert loader.RETURN_TYPES == ("MODEL",)
    (patcher,) = getattr(loader(), loader.FUNCTION)("built", model_type, runner="onnxruntime")
    assert patcher.model.memory_required([4, 4, 16, 24]) == 0
    shapes = patcher.model.diffusion_model._denoiser.shapes
    tokens = shapes["encoder_hidden_states"][1]
    generator = torch.Generator().manual_seed(seed)
    given = {
        "x": (4, 4, 16, 24),
        "context": (4, tokens if isinstance(tokens, int) else TEXT, case.text),
        "y": (4, case.pooled),
    }
    x, context, y = (torch.randn(shape, generator=generator) for shape in given.values())
    t = torch.full((4,), case.t)
    conds = {name: torch.full((4,), value) for name, value in case.conds.items()}
    found = patcher.model.apply_model(x, t, context, y=y, **conds)
    with torch.no_grad():
        expected = case.of(pipeline, x, t, context, y)
    assert relative_error(found=[found.numpy()], expected=[expected.numpy()]) < 1e-4
    with pytest.raises(ValueError, match="no place for a ControlNet"):
        patcher.model.diffusion_model(x, t, context, y=y, control={"output": []})
