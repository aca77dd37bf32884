"""The configuration and processor files of a LeRobot policy's directory, read as data and checked before any library is
imported."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.policies.processing import IMAGES, Feature, Processing, Text
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.common.json_text import check_ordinary, read_json
from trt_nvfp4.common.model_config import check_counts, read_config

#: The types of policies that are taken apart here.
TYPES = ("act", "diffusion", "pi0", "pi05", "smolvla")
WEIGHTS = "model.safetensors"
_PRE, _POST = "policy_preprocessor.json", "policy_postprocessor.json"
_ACTION = "action"
# A camera of these is not there: the network sees a masked image instead.
_EMPTY = f"{IMAGES}empty_camera_"
_NEWLINES = ("pi0_new_line_processor", "smolvla_new_line_processor")
_STATE_IN_TEXT = "pi05_prepare_state_tokenizer_processor_step"
_NORMALIZING = ("normalizer_processor", "unnormalizer_processor")
_RELATIVE = ("relative_actions_processor", "absolute_actions_processor")
_KNOWN = (
    *("rename_observations_processor", "to_batch_processor", "device_processor", "tokenizer_processor"),
    *(*_NEWLINES, _STATE_IN_TEXT, *_NORMALIZING, *_RELATIVE),
)
_AGAIN = "download the whole checkpoint again"
# Normalization to [-1, 1]: the statistics at both ends.
_ENDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
# Options of a configuration that change the network's inputs or outputs in a way that is not described here.
_UNSUPPORTED = ("adapt_to_pi_aloha", "temporal_ensemble_coeff", "use_peft", "use_relative_actions")


def processing_of(directory: Path) -> Processing:
    """The contents of the configuration and the processor files.

    Raises ModelFaultError, naming the file: an unknown type, a missing file, a processor's step that is not known
    here, statistics that do not fit the configuration's sizes.
    """
    config = _config(directory)
    for name in (WEIGHTS, _PRE, _POST):
        if not (directory / name).is_file():
            raise _fault(
                directory / name,
                "is missing; download the whole checkpoint, or write the processor files of "
                "an older one with LeRobot's migrate_policy_normalization",
            )
    try:
        return _processing(directory, config)
    except KeyError as error:
        raise _fault(directory, f"its configuration, processor files or statistics lack {error}; {_AGAIN}") from error
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ModelFaultError(f"{_unread(directory)} ({error!r})") from error


def _config(directory: Path) -> Mapping[str, Any]:
    file = directory / "config.json"
    try:
        config: Any = read_config(directory)
        check_counts(config)
    except (OSError, ValueError) as error:
        raise _fault(file, str(error)) from error
    if config["type"] not in TYPES:
        raise _fault(
            file,
            f"the type {str(config['type'])[:40]!r} is not known here, which are {', '.join(TYPES)}; "
            "give a Python file with the policy's parts (model.py:components)",
        )
    if wrong := next((name for name in _UNSUPPORTED if config.get(name) not in (None, False)), None):
        raise _fault(file, f"{wrong} is not supported; take it out of the file if the policy works without it")
    return config  # type: ignore[no-any-return]


def _processing(directory: Path, config: Mapping[str, Any]) -> Processing:
    pre, post = (list(_steps(directory, name)) for name in (_PRE, _POST))
    shapes = {name: _shape(each) for name, each in {**config["input_features"], **config["output_features"]}.items()}
    by_name = {name: options for name, options, _ in pre}
    into = _normalized(directory, pre, shapes)
    restored = _normalized(directory, post, shapes)
    features = {
        name: into.get(name, Feature(shapes[name])) for name in config["input_features"] if not name.startswith(_EMPTY)
    }
    action = restored.get(_ACTION, Feature(shapes[_ACTION]))
    tokens = by_name.get("tokenizer_processor")
    text = tokens and Text(
        int(tokens["max_length"]),
        str(tokens.get("tokenizer_name", "")),
        any(name in by_name for name in _NEWLINES),
        _STATE_IN_TEXT in by_name,
    )
    names = config.get("action_feature_names") or [f"action {number}" for number in range(action.shape[0])]
    rename = by_name.get("rename_observations_processor", {}).get("rename_map", {})
    found = Processing(
        config["type"], features, action, names, config["n_obs_steps"], config["n_action_steps"], text or None, rename
    )
    return Processing.of(found.json(), _unread(directory))


def _steps(directory: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """(registered name, options, file of its statistics) of a processor file's steps."""
    for step in read_json(directory / name)["steps"]:
        registered, options = step.get("registry_name") or step.get("class"), step.get("config", {})
        if registered not in _KNOWN:
            raise _fault(
                directory / name,
                f"the step {str(registered)[:60]!r} is not known here; apply it yourself, and take it out of the file",
            )
        if registered in _RELATIVE and options.get("enabled"):
            raise _fault(directory / name, f"{registered} is not supported; train the policy on absolute actions")
        yield registered, options, step.get("state_file")


def _normalized(
    directory: Path, steps: list[tuple[str, Mapping[str, Any], str | None]], shapes: Mapping[str, list[int]]
) -> dict[str, Feature]:
    """The features that a step normalizes, by name."""
    found: dict[str, Feature] = {}
    for step, options, state in steps:
        if step not in _NORMALIZING:
            continue
        inverse = step == _NORMALIZING[1]
        statistics = _statistics(directory, state)
        for name, feature in options["features"].items():
            mode = options["norm_map"].get(feature["type"], "IDENTITY")
            own = statistics.get(name)
            if mode == "IDENTITY" or own is None or (name == _ACTION) != inverse:
                continue
            if name not in shapes:
                raise _fault(directory / _PRE, f"it normalizes {name}, which config.json does not list")
            center, scale = _affine(mode, own, float(options.get("eps", 1e-8)), inverse)
            if center.size != shapes[name][0]:
                raise _fault(
                    directory / str(state),
                    f"its statistics of {name} have {center.size} values, and config.json says {shapes[name]}: they "
                    "are another robot's; take the processor files that were saved with the policy",
                )
            found[name] = Feature(shapes[name], center.tolist(), scale.tolist())
    return found


def _statistics(directory: Path, name: str | None) -> dict[str, dict[str, np.ndarray]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if name is None:
        return {}
    file = directory / name
    if Path(name).name != name or not file.is_file():
        raise _fault(file, "is missing; download the whole checkpoint")
    found: dict[str, dict[str, np.ndarray]] = {}
    try:
        check_ordinary(file)
        tensors = load_file(file)
    except SafetensorError as error:
        raise _fault(file, f"cannot be read ({error}); download it again") from error
    for key, tensor in tensors.items():
        feature, _, statistic = key.rpartition(".")
        found.setdefault(feature, {})[statistic] = tensor.astype(np.float64).ravel()
    return found


def _affine(
    mode: str, statistics: Mapping[str, np.ndarray], eps: float, inverse: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale. LeRobot widens a deviation by `eps` where it divides by it."""
    if mode == "MEAN_STD":
        return statistics["mean"], statistics["std"] + (0.0 if inverse else eps)
    low, high = (statistics[name] for name in _ENDS[mode])
    half = np.where(high == low, eps, high - low) / 2
    return low + half, half


def _shape(feature: Mapping[str, Any]) -> list[int]:
    shape = [int(size) for size in feature["shape"]]
    if not 1 <= math.prod(shape) <= 1 << 28:
        raise ValueError(f"a feature has the shape {shape}")
    return shape


def _unread(directory: Path) -> str:
    return f"{directory}: its configuration and processor files cannot be read; {_AGAIN}"


def _fault(file: Path, what: str) -> ModelFaultError:
    return ModelFaultError(f"{file}: {what}")
