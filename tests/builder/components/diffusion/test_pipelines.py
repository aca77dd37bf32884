"""Small pipelines with random weights: parts make diffusers' pictures, and wrong inputs have a message."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("diffusers")

import trt_nvfp4.diffusers
from trt_nvfp4.builder.components.diffusion.adapters import FILE
from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.components.diffusion.runs import PictureOptions
from trt_nvfp4.builder.components.diffusion.source import of_pipeline
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.source import is_of_parts
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.pipeline import parts_build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.metrics import psnr, relative_error

from .pipelines import FAMILIES, saved

#: Families whose text is of any length, one of them with lists of pictures and complex rotary embeddings.
DEFAULT = ("flux", "z_image")
PROMPT = "an old clock on a wall"


def picture(pipeline: Any, name: str, **options: Any) -> np.ndarray:
    """Of a prompt and seed that no build has seen."""
    size = PictureOptions.parse(*FAMILIES[name][1:2], 1, FAMILIES[name][2])
    assert size.largest is not None
    given = {"height": size.largest.height, "width": size.largest.width, **size.arguments, **options}
    generator = torch.Generator().manual_seed(5)
    return np.asarray(pipeline(prompt=PROMPT, num_inference_steps=3, generator=generator, output_type="np", **given)[0])


def exported(name: str, model: Path, folder: Path, size: str | None = None, prompts: int = 1) -> Manifest:
    _, own_size, arguments = FAMILIES[name]
    source = of_pipeline(model, PictureOptions.parse(size or own_size, prompts, arguments))
    folder.mkdir()
    parts = [part.export(source.name, folder) for part in source.parts]
    manifest = Manifest(source.task, parts, source.flows, source.settings, source.name).check()
    manifest.save(folder)
    return manifest


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.nightly) for name in FAMILIES]
)
def test_parts_make_the_pipelines_pictures(name: str, tmp_path: Path, seed: int) -> None:
    """In three steps, with a prompt of another length than those of the build; the script changes by one line."""
    saved(name, tmp_path / name, seed=seed)
    assert is_of_parts(tmp_path / name)
    pipeline = open_pipeline(tmp_path / name)
    expected = picture(pipeline, name)
    manifest = exported(name, tmp_path / name, tmp_path / "parts")
    assert Manifest.load(tmp_path / "parts").parts == manifest.parts
    loaded = trt_nvfp4.diffusers.load(tmp_path / name, tmp_path / "parts", runner="onnxruntime")
    assert relative_error(found=[picture(loaded, name)], expected=[expected]) < 1e-3
    if name == "z_image":
        in_place = trt_nvfp4.diffusers.load(pipeline, tmp_path / "parts", runner="onnxruntime")
        assert in_place is pipeline
        assert in_place.transformer.device.type == "cpu"
        assert next(in_place.transformer.parameters()).is_meta
        assert relative_error(found=[picture(in_place, name)], expected=[expected]) < 1e-3
    with pytest.raises(BuilderError, match=r"transformer: .*make pictures of the size|is built for"):
        picture(loaded, name, height=64, width=64)


@pytest.mark.nightly  # two minutes; pictures through parts, and other models' bundles, are in the default run
def test_bundle_with_nvfp4_blocks(tmp_path: Path) -> None:
    """Calibrated on prompts over all steps: at least 95 % of the blocks' weights are NVFP4, products of many rows W4A4
    and modulation W4A16; embedders and the output's projection stay. Sizes may be a range, prompts several."""
    saved("sd3", tmp_path / "sd3")  # one draw: of how much errors grow in random weights there is no bound
    (tmp_path / "prompts.txt").write_text("a red chair\nrain over the sea\n")
    report = parts_build.run(
        Request(
            tmp_path / "sd3",
            find_target("rtx-blackwell"),
            bundle=tmp_path / "bundle",
            image_size="16x32..32x48",
            max_batch=2,
            pipeline_arguments=FAMILIES["sd3"][2],
            calib_data=tmp_path / "prompts.txt",
        )
    )
    assert report.chain["export_error"] < 1e-3
    assert report.chain["cosine"] > 0.9
    entries = report.parts["transformer"].subgraphs
    by_decision = {entry["name"].removeprefix("module.module."): entry["decision"] for entry in entries}
    kept = {name for name, decision in by_decision.items() if decision == "keep"}
    assert "proj_out" in kept
    assert all("transformer_blocks" not in name for name in kept)
    few_rows = {entry["decision"] for entry in entries if entry["reason_code"] == "few_rows"}
    assert few_rows == {by_decision["transformer_blocks.0"]} == {"nvfp4_w4a16"}  # the modulation of a block
    assert by_decision["transformer_blocks.0.ff.net"] == "nvfp4_w4a4"
    profile = report.parts["transformer"].profiles["hidden_states"]
    assert profile == [[2, 4, 8, 16], [4, 4, 16, 24], [4, 4, 16, 24]]
    loaded = trt_nvfp4.diffusers.load(tmp_path / "sd3", tmp_path / "bundle", runner="onnxruntime")
    expected = picture(open_pipeline(tmp_path / "sd3"), "sd3", height=32, width=32)
    assert psnr(found=picture(loaded, "sd3", height=32, width=32), expected=expected) > 15


def altered(folder: Path, file: str, change: Any) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def without_folder(folder: Path) -> None:
    shutil.rmtree(folder / "transformer")


def without_weights(folder: Path) -> None:
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()


def half_a_file(folder: Path) -> None:
    (file,) = (folder / "transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def other_library(folder: Path) -> None:
    altered(folder, "model_index.json", lambda index: index.update(transformer=["my_code", "Network"]))


def other_pipeline(folder: Path) -> None:
    altered(folder, "model_index.json", lambda index: index.update(_class_name="os.system"))


def too_many_layers(folder: Path) -> None:
    altered(folder / "transformer", "config.json", lambda config: config.update(n_layers=10**9))


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines") / "z_image"
    saved("z_image", folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_folder, r"names transformer \(ZImageTransformer2DModel\), and its folder is missing"),
        (without_weights, r"transformer: holds no weights \(\*\.safetensors\)"),
        (half_a_file, r"transformer/.*: not a safetensors file, or an incomplete one"),
        (other_library, r"transformer is \['my_code', 'Network'\], expected a class of diffusers or transformers"),
        (other_pipeline, r"names the pipeline 'os.system', which diffusers .* does not have"),
        (too_many_layers, r"config.json: ValueError: n_layers is 1000000000"),
    ],
)
def test_broken_folders(change: Any, message: str, z_image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(z_image, folder)
    change(folder)
    with pytest.raises(BuilderError, match=message) as caught:
        open_pipeline(folder)
    assert caught.value.exit_code == MODEL_AT_FAULT


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ("33x48", None, r"ZImagePipeline does not run at --set image-size=33x48: ValueError: Height must be divisible"),
        ("32x48", "frames=5", r"ZImagePipeline takes no frames"),
        ("32x48", "height=5", r"expected NAME=VALUE,..., other names than prompt, height"),
        ("32", None, None),
        ("0x48", None, r"expected HEIGHTxWIDTH"),
    ],
)
def test_sizes_and_arguments(size: str, arguments: str | None, message: str | None, z_image: Path) -> None:
    if message is None:
        assert PictureOptions.parse(size, 1, arguments).largest == PictureOptions.parse("32x32", 1, None).smallest
        return
    with pytest.raises(BuilderError, match=message) as caught:
        of_pipeline(z_image, PictureOptions.parse(size, 1, arguments))
    assert caught.value.exit_code == USAGE


def test_adapters_are_merged(z_image: Path, tmp_path: Path) -> None:
    """As diffusers computes with the adapter beside the weights; one of another model is refused."""
    peft = pytest.importorskip("peft")
    pipeline = open_pipeline(z_image)
    pipeline.transformer.add_adapter(
        peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "w1"], init_lora_weights=False)
    )
    layers = peft.get_peft_model_state_dict(pipeline.transformer)
    type(pipeline).save_lora_weights(tmp_path / "lora", transformer_lora_layers=layers)
    expected = picture(pipeline, "z_image")
    source = of_pipeline(z_image, PictureOptions.parse("32x48", 1, None), Adapter(tmp_path / "lora"))
    assert source.example.run is not None
    merged = source.example.run.pipeline  # type: ignore[attr-defined]
    assert relative_error(found=[picture(merged, "z_image")], expected=[expected]) < 1e-4
    assert relative_error(found=[picture(open_pipeline(z_image), "z_image")], expected=[expected]) > 1e-3
    wide = {name: torch.cat([tensor, tensor], 1) for name, tensor in layers.items()}
    more = layers | {name.replace("layers.1.", "layers.9."): tensor.clone() for name, tensor in layers.items()}
    other = {f"other.{name}": tensor for name, tensor in layers.items()}
    for folder, tensors in {"wide": wide, "more": more, "other": other, "empty": {}}.items():
        (tmp_path / folder).mkdir()
        save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, tmp_path / folder / FILE)
        with pytest.raises(BuilderError, match="it is of another model") as caught:
            of_pipeline(z_image, PictureOptions(), Adapter(tmp_path / folder))
        assert caught.value.exit_code == MODEL_AT_FAULT, folder
    (tmp_path / "empty" / FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    for folder, message in (("empty", "a Git LFS pointer"), ("none", "holds no pytorch_lora_weights.safetensors")):
        with pytest.raises(BuilderError, match=message) as caught:
            of_pipeline(z_image, PictureOptions(), Adapter(tmp_path / folder))
        assert caught.value.exit_code == MODEL_AT_FAULT, folder
