"""A decoder behind other parts, as what `generate_ids` drives: one step from token ids to logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.chain import run_part
from trt_nvfp4.builder.components.devices.device import Device, Handle
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.export.decoder_contract import IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, Decoder
from trt_nvfp4.builder.generate.caches import cache_shapes, last_logits
from trt_nvfp4.builder.generate.logits import HostLogits

POSITIONS, GROUPS = "position_ids", "groups"


class PartsRunner:
    """The parts from the embedding on, or the decoder alone, over one batch. `features` come from the parts before."""

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
        self._caches: dict[str, Handle] = {}
        self._shift = np.zeros(0, np.int64)

    def start(self, batch: int) -> None:
        self._caches = {
            name: self._device.zeros(name, shape, self._decoder.inputs[name])
            for name, shape in cache_shapes(self.decoder, batch).items()
        }
        self._shift = np.zeros(batch, np.int64)

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> HostLogits:
        arrays = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        if POSITIONS in self._decoder.inputs:
            arrays[POSITIONS] = self._positions(ids, past, new)
        if GROUPS in self._decoder.inputs:
            arrays[GROUPS] = self._groups(ids, past, new)
        ports = {**(self._embed.inputs if self._embed is not None else {}), **self._decoder.inputs}
        put = {
            name: self._device.put(f"step.{name}", arrays[name], ports[name]) for name in arrays.keys() & ports.keys()
        }
        given = {**self.given, **put}
        values = dict(self.values)
        if self._embed is not None:
            values |= run_part(self._device, self._manifest, self._embed, given, values)
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
        return HostLogits(last_logits(self._device.get(found[LOGITS]), new))

    def close(self) -> None:
        self._caches, self.values, self.given = {}, {}, {}

    def _positions(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> np.ndarray:
        """[3, batch, new]: time, height and width. A text token has one number for all three; an image's tokens have
        those of their place, and what follows an image continues behind its longer side."""
        image = self._settings["image"]
        _, height, width = (size // step for size, step in zip(image["grid"], (1, *[self._merge] * 2), strict=True))
        found = np.zeros((3, *ids.shape), np.int64)
        for row, tokens in enumerate(ids):
            if past[row]:
                found[:, row] = past[row] + self._shift[row] + np.minimum(np.arange(len(tokens)), new[row] - 1)
                continue
            at = position = 0
            while at < new[row]:
                if tokens[at] == image["token_id"] and new[row] - at >= height * width:
                    place = np.indices((1, height, width)).reshape(3, -1)
                    found[:, row, at : at + height * width] = place + position
                    at, position = at + height * width, position + max(height, width)
                else:
                    found[:, row, at] = position
                    at, position = at + 1, position + 1
            found[:, row, at:] = position - 1
            self._shift[row] = position - new[row]
        return found

    @property
    def _merge(self) -> int:
        return int(self._settings["merge"])

    def _groups(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> np.ndarray:
        """[batch, new]: which tokens see each other in both directions, all of a prompt or those of one image."""
        valid = (np.arange(ids.shape[1])[None] < new[:, None]) & (past == 0)[:, None]
        if self._settings["groups"] == "prompt":
            return np.where(valid, 0, -1)
        images = (ids == self._settings["image"]["token_id"]) & valid
        begins = images & ~np.pad(images, ((0, 0), (1, 0)))[:, :-1]
        return np.where(images, np.cumsum(begins, 1) - 1, -1)
