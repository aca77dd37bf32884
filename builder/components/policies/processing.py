"""The steps between a robot and its policy's network, as data in the manifest: names, shapes, normalization, text.

Imports only NumPy and the errors: bundles carry this module.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trt_nvfp4.builder.errors import ModelFaultError, UsageError

IMAGES, STATE, TASK = "observation.images.", "observation.state", "task"
TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
#: The manifest's setting that holds a `Processing`.
POLICY = "policy"
# Bins of a state value that is written as a number among the task's text.
_BINS = 256
# More than any policy has.
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Feature:
    """A tensor of `shape`, one row of actions or one observation of a robot. Normalized: (value - center) / scale, per
    channel of an image, else per value; both are empty where the network takes the values as they are."""

    shape: Sequence[int]
    center: Sequence[float] = ()
    scale: Sequence[float] = ()

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    def normalized(self, value: np.ndarray) -> np.ndarray:
        """float32, of robot's units."""
        if not len(self.center):
            return value.astype(np.float32)
        shape = (-1, 1, 1) if self.is_image else (-1,)
        center, scale = (np.asarray(numbers).reshape(shape) for numbers in (self.center, self.scale))
        found: np.ndarray = ((value - center) / scale).astype(np.float32)
        return found

    def restored(self, value: np.ndarray) -> np.ndarray:
        """float32 in the robot's units, of normalized values."""
        if not len(self.center):
            return value.astype(np.float32)
        found: np.ndarray = (value * np.asarray(self.scale) + np.asarray(self.center)).astype(np.float32)
        return found


@dataclass(frozen=True)
class Text:
    """How the task becomes tokens: `longest` of them; with a line feed behind it, or with the state's bins in it."""

    longest: int
    tokenizer: str
    newline: bool = False
    with_state: bool = False

    def prompt(self, task: str, state: np.ndarray | None) -> str:
        """`state`: normalized, between -1 and 1."""
        if self.with_state and state is not None:
            edges = np.linspace(-1, 1, _BINS + 1)[:-1]
            numbers = " ".join(map(str, np.digitize(state, edges) - 1))
            words = task.strip().replace("_", " ").replace("\n", " ")
            return f"Task: {words}, State: {numbers};\nAction: "
        return f"{task}\n" if self.newline and not task.endswith("\n") else task

    def padded(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Tokens int64 [1, longest] and what of them counts, bool [1, longest]."""
        ids = list(ids)[: self.longest]
        tokens, mask = np.zeros((1, self.longest), np.int64), np.zeros((1, self.longest), bool)
        tokens[0, : len(ids)], mask[0, : len(ids)] = ids, True
        return {TOKENS: tokens, MASK: mask}


@dataclass(frozen=True)
class Processing:
    """`features`: what is observed, by LeRobot's names. `rename`: other names that a robot may give them. `history`:
    observations that the network sees. `used`: rows of a chunk that are carried out before the next is computed."""

    type: str
    features: Mapping[str, Feature]
    action: Feature
    joints: Sequence[str]
    history: int
    used: int
    text: Text | None
    rename: Mapping[str, str]

    def prepared(
        self, observation: Mapping[str, Any], encode: Callable[[str], Sequence[int]] | None = None
    ) -> dict[str, np.ndarray]:
        """The network's inputs for one observation, each with an axis of one in front.

        `observation`: by name, images in uint8 [height, width, 3] or float [3, height, width] from 0 to 1, everything
        else in the robot's units; `task` is text, or tokens. Raises UsageError for what does not fit.
        """
        given = {self.rename.get(name, name): value for name, value in observation.items()}
        cameras = [name for name, feature in self.features.items() if feature.is_image]
        if odd := sorted(name for name in given if name.startswith(IMAGES) and name not in cameras):
            raise UsageError(
                f"the policy has no camera {odd[0]!r}; its {len(cameras)} are {', '.join(cameras) or 'none'}"
            )
        found = {name: self._value(name, given) for name in self.features}
        if self.text is not None:
            found |= self.text.padded(self._tokens(given.get(TASK), found.get(STATE), encode))
        return found

    def joint_errors(self, expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
        """The largest difference of each joint, in the robot's units, of normalized actions [..., joints]."""
        differences = np.abs(self.action.restored(expected) - self.action.restored(found))
        largest = differences.reshape(-1, len(self.joints)).max(0)
        return dict(zip(self.joints, map(float, largest), strict=True))

    def _value(self, name: str, given: Mapping[str, Any]) -> np.ndarray:
        feature = self.features[name]
        if name not in given:
            cameras = sum(each.is_image for each in self.features.values())
            what = f"the camera {name!r}; the policy sees {cameras}" if feature.is_image else repr(name)
            raise UsageError(f"the observation lacks {what}; it takes {', '.join(self.features)}")
        value = np.asarray(given[name])
        if feature.is_image and value.dtype == np.uint8 and value.ndim == 3:
            value = value.transpose(2, 0, 1) / np.float32(255)
        if value.shape != tuple(feature.shape) or value.dtype.kind not in "fiu":
            size = f"{value.dtype} {list(value.shape)}, expected {list(feature.shape)}"
            hint = "resize the image" if feature.is_image else "the policy was trained on another robot"
            raise UsageError(f"{name} is {size}: {hint}")
        return feature.normalized(value)[None]

    def _tokens(
        self, task: Any, state: np.ndarray | None, encode: Callable[[str], Sequence[int]] | None
    ) -> Sequence[int]:
        assert self.text is not None
        if task is None or (isinstance(task, str) and encode is None):
            raise UsageError("the observation lacks 'task': give its text, or its tokens without a tokenizer")
        if not isinstance(task, str):
            return [int(token) for token in task]
        assert encode is not None
        return encode(self.text.prompt(task, None if state is None else state[0]))

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: Any, where: str = "components.json: its policy cannot be read; build it again") -> Processing:
        """From JSON. Raises ModelFaultError for anything else, since anybody may have written it; its message begins
        with `where`."""
        try:
            text = found["text"]
            made = cls(
                str(found["type"]),
                {str(name): _feature(feature) for name, feature in found["features"].items()},
                _feature(found["action"]),
                [str(name) for name in found["joints"]],
                _count(found["history"]),
                _count(found["used"]),
                None if text is None else Text(**{**text, "longest": _count(text["longest"])}),
                {str(old): str(new) for old, new in found["rename"].items()},
            )
            if len(made.action.shape) != 1 or len(made.joints) != made.action.shape[0]:
                raise ValueError(f"{len(made.joints)} joints, and actions of {list(made.action.shape)}")
            if any(0 in feature.scale for feature in made.features.values()):
                raise ValueError("an observation is divided by 0")
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ModelFaultError(f"{where} ({error!r})") from error
        return made


def _feature(found: Mapping[str, Any]) -> Feature:
    made = Feature(
        [_count(size) for size in found["shape"]],
        [float(number) for number in found["center"]],
        [float(number) for number in found["scale"]],
    )
    if len(made.center) not in (0, made.shape[0]) or len(made.scale) != len(made.center):
        raise ValueError(f"{len(made.center)} and {len(made.scale)} numbers normalize {list(made.shape)}")
    if not np.isfinite([*made.center, *made.scale]).all():
        raise ValueError("center and scale are expected to be finite")
    return made


def _count(size: Any) -> int:
    if type(size) is not int or not 1 <= size <= _LARGEST:
        raise ValueError(f"a size is {reprlib.repr(size)}, expected 1 to {_LARGEST}")
    return size
