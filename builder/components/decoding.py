"""A decoder behind other parts as a runner for `generate_ids`: one step from token ids to logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.chain import Values, run_part
from trt_nvfp4.builder.components.devices.device import Device, Handle
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.caches import cache_shapes, last_logits, row_axis
from trt_nvfp4.builder.generate.logits import HostLogits
from trt_nvfp4.builder.model.decoder_contract import IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, Decoder

POSITIONS, GROUPS = "position_ids", "groups"


class PartsRunner:
    """The parts from the embedding on, or only the decoder, over one batch. `features` come from the parts before."""

    def __init__(self, device: Device, manifest: Manifest, decoder: Decoder) -> None:
        self.name, self.decoder = device.name, decoder
        self._device, self._manifest = device, manifest
        self._decoder = manifest.part("decoder")
        self._embed = next((part for part in manifest.parts if part.name == "embed"), None)
        axis = 1
        self.longest_step = device.longest("decoder", decoder.tokens, axis) or decoder.capacity
        self._settings: Mapping[str, Any] = manifest.settings
        #: Outputs of the parts that ran before, by "part.name", and inputs that are the caller's.
        self.values: dict[str, Handle] = {}
        self.given: dict[str, Handle] = {}
        #: Where the images of a run are a video's: how many, and how far apart their positions are in time.
        self.video: tuple[int, float] | None = None
        self._caches: dict[str, Handle] = {}
        #: Where a row by itself is copied to, from the first such step on.
        self._caches_of_one: dict[str, Handle] = {}
        #: For each sequence and token: the position behind it, of models whose positions depend on images.
        self._next = np.zeros((0, 0), np.int64)

    def start(self, batch: int) -> None:
        self._caches = self._empty(batch)
        self._next = np.zeros((batch, self.decoder.capacity + 1), np.int64)

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> HostLogits:
        arrays = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        if POSITIONS in self._decoder.inputs:
            arrays[POSITIONS] = self._positions(self._places(ids, past), past, new)
        if GROUPS in self._decoder.inputs:
            arrays[GROUPS] = self._groups(self._places(ids, past), past, new)
        ports = {**(self._embed.inputs if self._embed is not None else {}), **self._decoder.inputs}
        put = {
            name: self._device.put(f"step.{name}", arrays[name], ports[name]) for name in arrays.keys() & ports.keys()
        }
        given = {**self.given, **put}
        values = {**self.values, **self._embedded(ids, given)}
        sources = self._manifest.sources(self._decoder)
        feeds = {
            name: self._caches[name]
            if name in self._caches
            else values[sources[name]]
            if name in sources
            else given[name]
            for name in self._decoder.inputs
        }
        in_place = dict(zip(self.decoder.presents, self.decoder.caches, strict=True))
        found = self._device.run("decoder", feeds, in_place)
        self._caches = {cache: found[present] for present, cache in in_place.items()}
        return HostLogits(last_logits(self.decoder, self._device.get(found[LOGITS]), new, count))

    def hidden(self) -> np.ndarray:
        raise UsageError(f"{self.name}: its decoder gives no hidden states")

    def save_states(self) -> None:
        """Parts keep no recurrent states."""

    def restore_states(self, rows: Sequence[int]) -> None:
        """Parts keep no recurrent states."""

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> HostLogits:
        whole, positions = self._caches, self._next
        self._caches_of_one = self._caches_of_one or self._empty(1, "row.")
        self._caches, self._next = dict(self._caches_of_one), positions[row : row + 1]
        try:
            for name, cache in whole.items():
                self._device.copy_row(cache, row, self._caches[name], 0, row_axis(name))
            logits = self.step(ids, past, new, count)
            for name, cache in whole.items():
                self._device.copy_row(self._caches[name], 0, cache, row, row_axis(name))
        finally:
            self._caches, self._next = whole, positions
        return logits

    def _empty(self, batch: int, prefix: str = "") -> dict[str, Handle]:
        """Empty caches of so many rows, on the device by names with `prefix`."""
        return {
            name: self._device.zeros(prefix + name, shape, self._decoder.inputs[name])
            for name, shape in cache_shapes(self.decoder, batch).items()
        }

    def clear_row(self, row: int) -> None:
        for name, cache in self._caches.items():
            self._device.clear_row(cache, row, row_axis(name))

    def copy_row(self, source: int, target: int) -> None:
        for name, cache in self._caches.items():
            self._device.copy_row(cache, source, cache, target, row_axis(name))
        self._next[target] = self._next[source]

    def close(self) -> None:
        self._caches, self._caches_of_one, self.values, self.given = {}, {}, {}, {}

    def _embedded(self, ids: np.ndarray, given: Mapping[str, Handle]) -> Values:
        """The embedding's outputs for the tokens and the features of images; none where the decoder takes tokens."""
        if self._embed is None:
            return {}
        return run_part(self._device, self._manifest, self._embed, given, self.values)

    def _places(self, ids: np.ndarray, past: np.ndarray) -> np.ndarray:
        """[batch, new]: the place of each token within its image, or the video, -1 for text. Images stand in a text's
        first step."""
        image, count = self._settings["image"], 1 if self.video is None else self.video[0]
        index, seen = np.arange(ids.shape[1]), (ids == image["token_id"]) & (past == 0)[:, None]
        begins = np.maximum.accumulate(np.where(seen, -1, index), 1) + 1
        return np.where(seen, (index - begins) % (image["tokens"] * count), -1)

    def _positions(self, places: np.ndarray, past: np.ndarray, new: np.ndarray) -> np.ndarray:
        """[3, batch, new]: time, height and width. A text token has one number for all three; an image's tokens have
        those of their place, and what follows an image continues behind its longer side, as in transformers' generate
        also where a video's positions in time reach further."""
        height, width = (size // int(self._settings["merge"]) for size in self._settings["image"]["grid"][1:])
        count, apart = self.video or (1, 0.0)
        grid = np.indices((count, height, width)).reshape(3, -1)
        grid[0] = (grid[0].astype(np.float32) * np.float32(apart)).astype(np.int64)
        found = np.zeros((3, *places.shape), np.int64)
        for row, in_image in enumerate(places):
            behind = self._next[row]
            for at, place in enumerate(in_image[: new[row]], past[row]):
                behind[at + 1] = behind[at]
                found[:, row, at - past[row]] = behind[at] + (0 if place < 0 else grid[:, place])
                if place < 0 or place == grid.shape[1] - 1:
                    behind[at + 1] += 1 if place < 0 else max(height, width)
            found[:, row, new[row] :] = behind[past[row] + new[row]] - 1
        return found

    def _groups(self, places: np.ndarray, past: np.ndarray, new: np.ndarray) -> np.ndarray:
        """[batch, new]: which tokens see each other in both directions, all of a prompt or those of one image."""
        valid = np.arange(places.shape[1])[None] < new[:, None]
        if self._settings["groups"] == "prompt":
            return np.where(valid & (past == 0)[:, None], 0, -1)
        images = (places >= 0) & valid
        begins = images & ~np.pad(images, ((0, 0), (1, 0)))[:, :-1]
        return np.where(images, np.cumsum(begins, 1) - 1, -1)
