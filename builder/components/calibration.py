"""Samples of the whole model, pushed through the chain, become samples of each part."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.components.chain import put_all, run_chain
from trt_nvfp4.builder.components.check import before_decoding
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.devices.device import Handle, numpy_type
from trt_nvfp4.builder.components.devices.onnx_device import OnnxDevice, decoder_of_parts
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.model.decoder_contract import IDS
from trt_nvfp4.calibration.samples.samples import InputSpec, save_sample


def specs_of(manifest: Manifest) -> dict[str, InputSpec]:
    """The inputs of the whole that a sample holds: of a model that generates, what its parts before the decoder take,
    and the prompt."""
    if manifest.task == "run":
        ports = manifest.given()
    else:
        ports = {
            name: port
            for part in manifest.parts
            if part.name != "decoder"
            for name, port in part.inputs.items()
            if name not in manifest.sources(part)
        }
    return {name: InputSpec(tuple(port.shape), numpy_type(port)) for name, port in ports.items()}


class _Recording(OnnxDevice):
    """Writes what goes into every part, one file per run: PART/NUMBER.npz."""

    def __init__(self, folder: Path, manifest: Manifest, destination: Path) -> None:
        super().__init__(folder, manifest)
        self._destination, self._runs = destination, Counter[str]()

    def run(self, part: str, feeds: Mapping[str, Handle], in_place: Mapping[str, str]) -> dict[str, Handle]:
        folder = self._destination / part
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: self.get(handle) for name, handle in feeds.items()}
        save_sample(folder / f"{self._runs[part]:05d}.npz", arrays)
        self._runs[part] += 1
        return super().run(part, feeds, in_place)


def record_prompts(
    folder: Path, manifest: Manifest, run: Callable[..., object], prompts: Iterable[str], destination: Path
) -> None:
    """Make a picture of each prompt, in as many steps as the pipeline takes, with the exported parts in `folder`; what
    each part is given lies in `destination`/PART."""
    device = _Recording(folder, manifest, destination)
    for prompt in prompts:
        run(device, manifest, prompt, None)
    device.close()


def record(folder: Path, manifest: Manifest, samples: Iterable[Mapping[str, np.ndarray]], destination: Path) -> None:
    """Run the exported parts in `folder` on every sample; what each part is given lies in `destination`/PART.

    A decoder is given each sample's prompt, or the tokens that it starts with, and then the likeliest token.
    """
    device = _Recording(folder, manifest, destination)
    runner = None if manifest.task == "run" else PartsRunner(device, manifest, decoder_of_parts(folder))
    for sample in samples:
        given = put_all(device, manifest, sample)
        if runner is None:
            run_chain(device, manifest, given)
            continue
        runner.given, runner.values = given, before_decoding(device, manifest, given)
        batch = len(next(iter(sample.values())))
        start = manifest.settings.get("start_tokens")
        ids = sample[IDS] if start is None else np.array([start] * batch, np.int64)
        runner.start(len(ids))
        new = np.full(len(ids), ids.shape[1], np.int64)
        logits = runner.step(ids, np.zeros_like(new), new)
        runner.step(logits.likeliest(1).ids, new, np.ones_like(new))
    device.close()
