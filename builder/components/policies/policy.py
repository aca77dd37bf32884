"""A policy at work: observations in, actions out, the network being whatever runs its parts.

Imports NumPy and what needs no more: bundles carry this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.policies.processing import MASK, POLICY, TOKENS, Processing
from trt_nvfp4.builder.errors import UsageError

#: What the last part gives: rows of normalized actions.
RESULT = "action.chunk"


class Policy:
    """Actions of one robot, one after the other.

    A chunk of actions is computed when the last one's are carried out. Noise comes from `seed`, and is new in each run
    without one.
    """

    def __init__(
        self,
        manifest: Manifest,
        run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
        encode: Callable[[str], Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> None:
        """`run` takes the manifest's inputs and gives its results; `encode` makes tokens of a task's text. Raises
        UsageError for parts that are not a policy, ModelFaultError for a policy without its description."""
        if POLICY not in manifest.settings:
            raise UsageError(f"{manifest.model}: is not a robot policy; its parts are {manifest.task}")
        self.processing = Processing.of(manifest.settings[POLICY])
        self._run, self._encode = run, encode
        observed = {*self.processing.features, TOKENS, MASK}
        self._noise = {name: port for name, port in manifest.given().items() if name not in observed}
        self._inputs = manifest.given().keys()
        self._history: deque[Mapping[str, np.ndarray]] = deque(maxlen=self.processing.history)
        self._queue: deque[np.ndarray] = deque()
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        """Forget observations and actions, at the beginning of an episode."""
        self._history.clear()
        self._queue.clear()
        self._rng = np.random.default_rng(seed)

    def select_action(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The next action, float32 [joints] in the robot's units; `observation` as `Processing.prepared`."""
        return self.processing.action.restored(self.next_action(self._prepared(observation)))

    def predict_action_chunk(
        self, observation: Mapping[str, Any], noise: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """All actions that follow this observation, float32 [rows, joints] in the robot's units. `noise`: by input."""
        return self.processing.action.restored(self.next_chunk(self._prepared(observation), noise))

    def next_action(self, prepared: Mapping[str, np.ndarray]) -> np.ndarray:
        """As `select_action`, of what is normalized, normalized."""
        if self._queue:
            self._remember(prepared)
        else:
            self._queue.extend(self.next_chunk(prepared)[: self.processing.used])
        return self._queue.popleft()

    def next_chunk(
        self, prepared: Mapping[str, np.ndarray], noise: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """As `predict_action_chunk`, of what is normalized, normalized."""
        self._remember(prepared)
        given = dict(prepared)
        if self.processing.history > 1:
            given = {name: np.stack([each[name] for each in self._history], 1) for name in prepared}
        shapes = {name: [int(dim) for dim in port.shape] for name, port in self._noise.items()}
        given |= {name: self._rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        given |= noise or {}
        found: np.ndarray = self._run({name: given[name] for name in self._inputs})[RESULT][0]
        return found

    def _prepared(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self.processing.prepared(observation, self._encode)

    def _remember(self, prepared: Mapping[str, np.ndarray]) -> None:
        """Add the newest observation; the first one stands for those before it."""
        self._history.append(prepared)
        while len(self._history) < self.processing.history:
            self._history.append(prepared)
