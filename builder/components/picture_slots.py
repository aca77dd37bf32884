"""A vision-language model as the slots of a server: every row of the caches is a text of its own, begun at any time.

The token of an image's feature has an id of its own, at the vocabulary's end or above: the image's number and the place
within it. So a step says which features it takes, pieces of a prompt may end within an image, and texts with the same
images share their beginning.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from trt_nvfp4.builder.components.chain import Values, check_array, put_all, run_part
from trt_nvfp4.builder.components.decoding import PartsRunner
from trt_nvfp4.builder.components.devices.device import Handle, numpy_type
from trt_nvfp4.builder.components.devices.onnx_device import decoder_of_parts
from trt_nvfp4.builder.components.devices.open import open_device
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.prompts import with_features
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.logits import HostLogits
from trt_nvfp4.builder.generate.open import RunnerName
from trt_nvfp4.builder.model.decoder_contract import IDS

#: Images whose features are kept after their last text, for the next turn of a chat.
_KEPT = 32


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the decoder sees it: the ids of its tokens, and what the embedding takes, each [tokens, width]."""

    ids: list[int]
    features: Mapping[str, np.ndarray]


class PictureSlots(PartsRunner):
    """Parts with a vision encoder, in the folder that `build-engine` wrote."""

    def __init__(self, folder: Path, runner: RunnerName = "auto") -> None:
        """Raises UsageError for parts of another kind, and where all of a prompt must come in one piece; else as
        `Pipeline`."""
        manifest = Manifest.load(folder)
        image = manifest.settings.get("image")
        if manifest.task != "generate" or image is None or manifest.settings.get("hears"):
            raise UsageError(f"{folder}: no language model, with or without images; only such models are served")
        if manifest.settings["groups"] is not None:
            raise UsageError(
                f"{folder}: its tokens see tokens that follow, so that no prompt can come in pieces beside others; "
                "run it with generate, or serve its text only (build-engine --task text)"
            )
        self.preprocessing = manifest.settings["preprocessing"]
        if self.preprocessing is None:
            raise UsageError(
                f"{folder}: the manifest does not describe the model's image processor "
                f"({manifest.settings.get('no_preprocessing')}), and a server needs it; serve its text only "
                "(build-engine --task text)"
            )
        super().__init__(open_device(folder, manifest, runner), manifest, decoder_of_parts(folder))
        self.image_token, self._tokens, self._alone = image["token_id"], image["tokens"], image["alone"]
        self._vision = manifest.part("vision")
        assert self._embed is not None
        #: Inputs of the embedding that are features, and where they come from.
        self._sources = manifest.sources(self._embed)
        most = self._device.longest("embed", next(iter(self._sources)), 0)
        #: Features that the embedding takes at a time.
        self._most = None if most is None else most * self._tokens
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        self._alive: WeakValueDictionary[int, Picture] = WeakValueDictionary()
        self._count = 0
        # The images of each row's text, by number, and where each begins.
        self._held: list[dict[int, tuple[Picture, int]]] = []
        self._stated = np.zeros((0, 0), np.int64)

    def start(self, batch: int) -> None:
        super().start(batch)
        self._held = [{} for _ in range(batch)]

    def see(self, pixels: np.ndarray) -> Picture:
        """Run the vision encoder on an image's pixel values, unless it has just seen the same ones. The features last
        as long as what is returned, or a row that has used them."""
        key = hashlib.sha256(pixels.tobytes()).digest()
        if key not in self._kept:
            ((name, port),) = self._vision.inputs.items()
            values = (pixels if self._alone else pixels[None]).astype(numpy_type(port))
            check_array(name, values, port)
            found = run_part(
                self._device, self._manifest, self._vision, put_all(self._device, self._manifest, {name: values}), {}
            )
            features = {name: self._device.get(found[source]) for name, source in self._sources.items()}
            first = self.decoder.vocab_size + self._count * self._tokens
            picture = Picture(
                list(range(first, first + self._tokens)),
                {name: each.reshape(self._tokens, -1) for name, each in features.items()},
            )
            self._kept[key] = self._alive[self._count] = picture
            self._count += 1
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def placed(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """The tokens of a prompt with those of its images in the places of their marks. Raises UsageError for another
        number of marks."""
        ((*found,),) = with_features([ids], len(pictures), self.image_token, self._tokens)
        features = iter([token for picture in pictures for token in picture.ids])
        return [next(features) if token == self.image_token else token for token in found]

    def copy_row(self, source: int, target: int) -> None:
        super().copy_row(source, target)
        self._held[target] = dict(self._held[source])

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> HostLogits:
        whole = self._held
        self._held = [whole[row]]
        try:
            return super().step_row(row, ids, past, new, count)
        finally:
            (whole[row],), self._held = self._held, whole

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> HostLogits:
        self._stated = ids
        for row, (held, tokens) in enumerate(zip(self._held, ids, strict=True)):
            kept = {number: entry for number, entry in held.items() if entry[1] < past[row]}
            numbers, begins = np.unique((tokens - self.decoder.vocab_size) // self._tokens, return_index=True)
            for number, begin in zip(numbers.tolist(), begins.tolist(), strict=True):
                if number >= 0:
                    picture = held[number][0] if number in held else self._alive[number]
                    kept.setdefault(number, (picture, int(past[row]) + begin))
            self._held[row] = kept
        return super().step(np.where(ids < self.decoder.vocab_size, ids, self.image_token), past, new, count)

    def _places(self, ids: np.ndarray, past: np.ndarray) -> np.ndarray:
        behind = self._stated - self.decoder.vocab_size
        return np.where(behind < 0, -1, behind % self._tokens)

    def _embedded(self, ids: np.ndarray, given: Mapping[str, Handle]) -> Values:
        assert self._embed is not None
        if self._most is None or (ids == self.image_token).sum() <= self._most:
            rows = range(len(ids))
            return run_part(self._device, self._manifest, self._embed, given, self._features(rows, slice(None)))
        # More than the embedding takes at a time.
        found: list[list[Values]] = []
        for row, tokens in enumerate(ids):
            found.append([])
            for begin in range(0, len(tokens), self._most):
                piece = slice(begin, begin + self._most)
                put = self._device.put("step.piece", tokens[None, piece], self._embed.inputs[IDS])
                values = self._features([row], piece)
                made = run_part(self._device, self._manifest, self._embed, {**given, IDS: put}, values)
                found[-1].append({name: self._device.get(handle) for name, handle in made.items()})
        joined = {
            name: np.concatenate([np.concatenate([piece[name] for piece in row], 1) for row in found])
            for name in found[0][0]
        }
        ports = self._embed.outputs
        return {
            name: self._device.put(f"joined {name}", each.astype(numpy_type(ports[port])), ports[port])
            for name, each in joined.items()
            for port in [name.partition(".")[2]]
        }

    def _features(self, rows: Iterable[int], piece: slice) -> Values:
        """The features of a step's image tokens, in their order, on the device; one image at least, and whole ones."""
        assert self._embed is not None
        known = self.decoder.vocab_size
        # An image's token that a text spells out is given zeros.
        wanted = [
            (self._held[row][(token - known) // self._tokens][0], (token - known) % self._tokens)
            if token >= known
            else (None, 0)
            for row in rows
            for token in self._stated[row, piece].tolist()
            if token >= known or token == self.image_token
        ]
        found = {}
        for name, source in self._sources.items():
            port = self._embed.inputs[name]
            _, *size = (int(dim) if isinstance(dim, int) else 1 for dim in port.shape)
            images = max(1, -(-len(wanted) // self._tokens))
            features = np.zeros((images, *size), numpy_type(port))
            flat = features.reshape(images * self._tokens, -1)
            for at, (picture, place) in enumerate(wanted):
                if picture is not None:
                    flat[at] = picture.features[name][place]
            found[source] = self._device.put(f"step.{name}", features, port)
        return found
