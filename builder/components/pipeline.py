"""Runs a model of parts: images, sound or text and a prompt in, text out; or tensors in and out."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.components.chain import Values, check_array, put_all, run_part, run_whole
from trt_nvfp4.builder.components.check import before_decoding, encoding_parts
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.devices.device import Device, numpy_type
from trt_nvfp4.builder.components.devices.onnx_device import decoder_of_parts
from trt_nvfp4.builder.components.devices.open import open_device
from trt_nvfp4.builder.components.images import Image, Preprocessing
from trt_nvfp4.builder.components.manifest import FILE, Manifest
from trt_nvfp4.builder.components.prompts import padded, with_features
from trt_nvfp4.builder.components.video import USUAL_RATE, Video, frames_of
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.generate.generator import Generation, Prompt, Result, Timings
from trt_nvfp4.builder.generate.loop import Finish, generate_ids
from trt_nvfp4.builder.generate.open import RunnerName, tokenizer_folder
from trt_nvfp4.builder.generate.sampling import Sampling
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.model.decoder_contract import IDS


class Pipeline:
    """The parts of a model as one, in the folder that `build-engine` wrote.

    >>> with Pipeline("paligemma") as pipeline:
    ...     print(pipeline.generate("describe", images=pixels).generations[0].text)

    `tokenizer`: a folder with tokenizer files; default: `tokenizer/` in the folder. `runner`: "tensorrt" on the GPU of
    the engines, "onnxruntime" on the CPU, "torch" on any NVIDIA GPU with the plugins, or "auto": TensorRT where every
    part has an engine, else ONNX Runtime. Raises BuilderError: usage for a folder that holds no parts, model for parts
    that are missing or do not fit each other.
    """

    def __init__(self, folder: str | Path, tokenizer: str | Path | None = None, *, runner: RunnerName = "auto") -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        self._device: Device = open_device(self.folder, self.manifest, runner)
        self._tokenizer_folder = tokenizer_folder(self.folder) if tokenizer is None else Path(tokenizer)
        self._tokenizer: Tokenizer | None = None
        generates = self.manifest.task == "generate"
        self._runner = PartsRunner(self._device, self.manifest, decoder_of_parts(self.folder)) if generates else None
        self.runs_on = self._device.name

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """Tokens that the caches hold. Raises UsageError for a model without a decoder."""
        return self._decoding().decoder.capacity

    def _decoding(self) -> PartsRunner:
        if self._runner is None:
            raise UsageError(f"{self.folder}: this model has no decoder: call run")
        return self._runner

    def close(self) -> None:
        """Free what the parts hold."""
        if self._runner is not None:
            self._runner.close()
        self._device.close()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a model without a decoder, by "part.name". Raises UsageError for other inputs."""
        if self._runner is not None:
            raise UsageError(f"{self.folder}: this model generates tokens: call generate")
        return run_whole(self._device, self.manifest, inputs)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The text's tokens, by the tokenizer beside the parts. Raises BuilderError as `Tokenizer`."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._tokenizer_folder)
        return self._tokenizer.encode(text, special_tokens)

    def embed(
        self, texts: str | Sequence[str] = (), images: np.ndarray | Sequence[Image] | None = None
    ) -> dict[str, np.ndarray]:
        """`text_embeds` of one text or several and `image_embeds` of images, either or both, each of length 1, by a
        pair of encoders (CLIP, SigLIP). Images as for `generate`; similarities are products of the two, scaled as the
        manifest's settings state. Raises UsageError for another model, where nothing is given, and for texts that are
        too long."""
        known = self.manifest.settings.get("embeds")
        if known is None:
            raise UsageError(f"{self.folder}: this model is not a pair of encoders: call run or generate")
        given: dict[str, np.ndarray] = {}
        if texts:
            ids = self._encoded(texts, 0)
            longest, padding = known["longest"], known["padding"]
            if wrong := [len(row) for row in ids if not 1 <= len(row) <= longest]:
                shorter = "; shorten it" if wrong[0] else ""
                raise UsageError(f"a text has {wrong[0]} tokens, expected 1 to {longest}{shorter}")
            if padding is not None:
                ids = [[*row, *[padding] * (longest - len(row))] for row in ids]
            given[IDS], given["attention_mask"] = padded(ids)
        pixels = self._pixels(images)
        if pixels is not None:
            given["pixel_values"] = pixels
        if not given:
            raise UsageError("there is nothing to embed: give texts or images")
        ports = self.manifest.given()
        for name, array in given.items():
            check_array(name, array, ports[name])
        handles = {name: self._device.put(name, array, ports[name]) for name, array in given.items()}
        parts = [part for part in self.manifest.parts if part.inputs.keys() <= given.keys()]
        values: Values = {}
        for part in parts:
            values |= run_part(self._device, self.manifest, part, handles, values)
        return {name.partition(".")[2]: self._device.get(value) for name, value in values.items()}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] = (),
        *,
        images: np.ndarray | Sequence[Image] | None = None,
        video: Video | None = None,
        fps: float = USUAL_RATE,
        sound: np.ndarray | None = None,
        start_tokens: Sequence[int] | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[int] | None = None,
    ) -> Result:
        """Continues each prompt; greedy by default.

        `images`: files, uint8 pixels [height, width, 3] or Pillow's images; or one array of pixel values, [images, ...]
        as the model's image processor gives them. They come in the order in which the prompts name them: each image's
        token stands once, and is repeated as often as the image has features, or stands as often already. Where no
        prompt names one and there is an image for each, they are put as the model's processor puts them. `video`: a
        folder of frames, an animation, a sequence of frames, or pixel values [moments, ...], in place of images; `fps`:
        frames of it in a second. The prompt names it by the token of a video or of an image. A model with
        an encoder reads the prompts, or `sound` ([batch, bins, frames] or [batch, samples]), or images, and begins with
        `start_tokens` (default: the model's own). Raises UsageError for inputs that do not fit.
        """
        runner = self._decoding()
        hears = bool(self.manifest.settings.get("hears"))
        runner.video = None
        if video is not None and (images is not None or sound is not None):
            raise UsageError("a video takes the place of images and sound; leave them out")
        pixels = sound if hears else self._pixels(images)
        if video is not None:
            pixels, runner.video = self._video(video, fps)
        texts = self._encoded(prompts, 0 if pixels is None else 1 if runner.video else len(pixels))
        begun = time.perf_counter()
        if "image" in self.manifest.settings:
            if (images if hears else sound) is not None:
                raise UsageError(f"{self.folder}: this model takes no {'images' if hears else 'sound'}")
            texts = self._see(runner, texts, pixels)
        else:
            texts = self._read(runner, texts, sound, pixels, start_tokens)
        found: list[list[int]] = [[] for _ in texts]
        finish: list[Finish] = ["length"] * len(texts)
        first: float | None = None
        stops = runner.decoder.eos_token_ids if stop is None else stop
        sampling = Sampling(temperature, top_k, top_p, seed)
        for tokens in generate_ids(runner, texts, max_new_tokens, sampling, stops):
            first = time.perf_counter() if first is None else first
            for token in tokens:
                found[token.sequence].append(token.id)
                finish[token.sequence] = token.finish or finish[token.sequence]
        assert first is not None
        total = sum(map(len, found))
        later = total - len(texts)
        timings = Timings(first - begun, later / (time.perf_counter() - first) if later else None, total)
        kept = [tokens[:-1] if why == "stop" else tokens for tokens, why in zip(found, finish, strict=True)]
        shown = ["" if self._tokenizer is None else self._tokenizer.decode(tokens) for tokens in kept]
        generations = [Generation(*fields) for fields in zip(texts, found, shown, finish, strict=True)]
        return Result(generations, timings, self.runs_on)

    def _see(self, runner: PartsRunner, texts: list[list[int]], images: np.ndarray | None) -> list[list[int]]:
        """Run the vision encoder; the prompts with a token for every feature."""
        part = encoding_parts(self.manifest)[0]
        ((name, port),) = part.inputs.items()
        image = self.manifest.settings["image"]
        one_by_one = image["alone"]
        if images is not None and images.ndim == len(port.shape) + one_by_one and len(images):
            for each in images if one_by_one else [images]:
                check_array(name, each, port)
        elif images is not None:
            expected = f"[count, {', '.join(map(str, port.shape if one_by_one else port.shape[1:]))}]"
            what = "sound is" if self.manifest.settings.get("hears") else "images are"
            raise UsageError(f"{what} {list(images.shape)}, expected {expected} ({name})")
        moments = 1 if runner.video is None else runner.video[0]
        count = 0 if images is None else len(images) // moments
        token, features = image["token_id"], image["tokens"] * moments
        spelt = "" if self._tokenizer is None else str(self._tokenizer.wrapped.convert_ids_to_tokens(token))
        marks = self._marks
        texts = [[token if each in marks else each for each in text] for text in texts]
        texts = [list(text) for text in with_features(texts, count, token, features, spelt)]
        longest = max(map(len, texts), default=0)
        if longest > runner.longest_step and (count or self.manifest.settings["groups"] == "prompt"):
            raise UsageError(
                f"{self.folder}: a prompt has {longest} tokens, those of images included, and one step of the decoder "
                f"takes {runner.longest_step}: such a prompt cannot be taken in pieces; shorten it, or "
                "build the model with longer prompts (--max-shapes)"
            )
        if images is None:
            # The embedding looks no feature up, and takes some all the same.
            shape = tuple(dim if isinstance(dim, int) else 1 for dim in port.shape)
            images = np.zeros(shape, numpy_type(port))[None] if one_by_one else np.zeros(shape, numpy_type(port))
        if not one_by_one:
            runner.values = self._features(name, images)
        elif len(images) == 1:
            runner.values = self._features(name, images[0])
        else:  # each run's features are lost in the next
            runner.values = self._joined(
                [{key: self._device.get(each) for key, each in self._features(name, one).items()} for one in images]
            )
        return texts

    @property
    def _marks(self) -> set[int]:
        """Tokens that name an image or a video."""
        settings = self.manifest.settings
        return {known["token_id"] for key in ("image", "video") if (known := settings.get(key))}

    def _joined(self, runs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, object]:
        """Features of images that the encoder saw one by one."""
        ports = {f"{part.name}.{name}": port for part in self.manifest.parts for name, port in part.outputs.items()}
        return {
            name: self._device.put(f"all {name}", np.concatenate([run[name] for run in runs]), ports[name])
            for name in runs[0]
        }

    def _features(self, name: str, pixels: np.ndarray) -> dict[str, object]:
        """The vision encoder's outputs for images, on the device."""
        return before_decoding(self._device, self.manifest, put_all(self._device, self.manifest, {name: pixels}))

    def _pixels(self, images: np.ndarray | Sequence[Image] | None) -> np.ndarray | None:
        """Pixel values [images, ...] of images as they come, or as they are given."""
        raw = images is not None and not (isinstance(images, np.ndarray) and images.dtype.kind == "f")
        if images is None or not raw:
            return images  # type: ignore[return-value]
        settings = self.manifest.settings
        if "preprocessing" not in settings:
            raise UsageError(f"{self.folder}: this model takes no images")
        if isinstance(images, (str, Path)) or not len(images):
            raise UsageError("images: expected a list of one image or more")
        preprocessing = self._preprocessing()
        return np.stack([preprocessing(image) for image in images])

    def _preprocessing(self) -> Preprocessing:
        settings = self.manifest.settings
        if settings["preprocessing"] is None:
            raise UsageError(
                f"{self.folder}: the manifest does not describe the model's image processor "
                f"({settings.get('no_preprocessing')}); give the pixel values that it makes, one float array"
            )
        return Preprocessing.of(settings["preprocessing"])

    def _video(self, video: Video, fps: float) -> tuple[np.ndarray, tuple[int, float]]:
        """Pixel values [moments, ...] of a video; how many there are, and how far apart in positions."""
        known = self.manifest.settings.get("video")
        if known is None:
            raise UsageError(f"{self.folder}: this model takes no video; give frames as images, and name each of them")
        step, image = known["frames"], self.manifest.settings["image"]
        if isinstance(video, np.ndarray) and video.dtype.kind == "f":
            pixels = video
        else:
            preprocessing = self._preprocessing()
            frames = frames_of(video, fps, self.capacity // image["tokens"] * step)
            pixels = np.stack([preprocessing.of_frames(frames[at : at + step]) for at in range(0, len(frames), step)])
        return pixels, (len(pixels), 1.0 if known["per_second"] is None else known["per_second"] * step / fps)

    def _read(
        self,
        runner: PartsRunner,
        texts: list[list[int]],
        sound: np.ndarray | None,
        pixels: np.ndarray | None,
        start_tokens: Sequence[int] | None,
    ) -> list[list[int]]:
        """Run the encoder; returns the tokens that the decoder begins with."""
        source = self.manifest.settings.get("source")
        if source is None:
            raise ModelFaultError(f"{self.folder / FILE}: does not say what the encoder reads (source); build it again")
        given = {"text": texts or None, "sound": sound, "images": pixels}
        if [kind for kind, value in given.items() if value is not None] != [source]:
            what = "prompts" if source == "text" else source
            raise UsageError(f"{self.folder}: this model reads {what}, and nothing else")
        arrays: dict[str, np.ndarray]
        if source == "text":
            if not all(texts):
                raise UsageError("a prompt is empty: give text to read")
            ids, mask = padded(texts)
            arrays = {IDS: ids, "attention_mask": mask}
        else:
            ((name, port),) = encoding_parts(self.manifest)[0].inputs.items()
            values = sound if sound is not None else pixels
            assert values is not None
            check_array(name, values, port)
            arrays = {name: values}
        put = put_all(self._device, self.manifest, arrays)
        runner.values, runner.given = before_decoding(self._device, self.manifest, put), put
        start = list(self.manifest.settings["start_tokens"] if start_tokens is None else start_tokens)
        return [list(start) for _ in next(iter(arrays.values()))]

    def _encoded(self, prompts: Prompt | Sequence[Prompt], images: int) -> list[list[int]]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(entry, int) for entry in prompts))
        batch: Sequence[object] = [prompts] if one else prompts
        around = self.manifest.settings.get("image", {}).get("prompt") if len(batch) == images else None
        return [self._ids(prompt, around) for prompt in batch]

    def _ids(self, prompt: object, around: Sequence[str] | None) -> list[int]:
        """The prompt's tokens; `around`: what stands before and behind a text that does not name its image itself."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]  # type: ignore[attr-defined]
        ids = self.encode(prompt)
        if around is None or self._marks & set(ids):
            return ids
        return self.encode(prompt.join(around), special_tokens=False)
