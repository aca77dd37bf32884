"""Plans on disk: YAML that a person may edit, with positions kept for messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trt_nvfp4.common.json_text import read_text
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.load.activation_types import ACTIVATIONS, Activations
from trt_nvfp4.graph_passes.load.source import ModelError

_HEADER = """\
# What becomes of each subgraph of the model. Edit `decision` and hand this file back with --plan.
#   decision, one of:
{decisions}
#   activations: what the rest of a float32 model computes in (bf16, fp16, keep), and which nodes stay float32, and why
#   recipe: how NVFP4 weights are made, names joined by + (docs/how_to/calibration.md)
#   residual_channels: of an entry with NVFP4 activations, 0, 32 or 64 in place of the recipe's
# An entry may be deleted: its subgraph is then kept. A reason starts with the decision that it is for. The rest of an
# entry says which subgraph is meant and what it computes, and must stay.
"""
# The plans of the largest mixtures of experts have some hundred thousands.
_MOST_VALUES = 10_000_000


class PlanError(ModelError):
    """An invalid plan, or one that does not fit the model."""

    exit_code = 2


def write(path: Path, plan: dict[str, Any], decisions: Mapping[str, str]) -> None:
    """Writes a plan, and in its header what each decision means; the file appears only when it is complete."""
    listed = "\n".join(f"#     {decision:<14}{meaning}" for decision, meaning in decisions.items())
    text = _HEADER.format(decisions=listed) + yaml.safe_dump(plan, sort_keys=False, width=120)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read(
    path: Path, plan_keys: tuple[str, ...], entry_keys: tuple[str, ...], optional_keys: tuple[str, ...]
) -> tuple[dict[str, Any], Activations, list[dict[str, Any]]]:
    """Reads a plan's own values, its activations and its entries, each with its `line`, which have the given
    keys. A plan of before there were activations keeps those of the model.

    Raises:
        PlanError: unreadable, not YAML, nested too deeply, a missing or unknown key, a value of the wrong type.
    """
    try:
        root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
        size = 0 if root is None else _size(root, {})
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise PlanError(f"{path}: not a YAML file: {error}") from error
    except RecursionError as error:
        raise PlanError(f"{path}: no plan: nested too deeply") from error
    if size > _MOST_VALUES:
        raise PlanError(f"{path}: no plan: it stands for {size} values; write a fresh plan with --stop-after plan")
    values = _mapping(path, root, "the plan", plan_keys, ("activations",))
    entries_node = values.pop("subgraphs")
    activations = _activations(path, values.pop("activations", None))
    if not isinstance(entries_node, yaml.SequenceNode):
        raise PlanError(f"{_at(path, entries_node)}: 'subgraphs' must be a list")
    plan = {key: _scalar(path, key, node, str) for key, node in values.items()}
    entries = []
    for index, node in enumerate(entries_node.value):
        entry = _mapping(path, node, f"subgraph {index}", entry_keys, optional_keys)
        entries.append(
            {key: _field(path, key, value) for key, value in entry.items()} | {"line": node.start_mark.line + 1}
        )
    return plan, activations, entries


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for. With aliases a short file stands for more than memory holds."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # of one that holds itself
        parts = (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] += sum(_size(part, known) for part in parts)
    return known[id(node)]


def activations_as_yaml(activations: Activations) -> dict[str, Any]:
    """The network's precision as a plan file holds it."""
    said: dict[str, Any] = {"type": activations.type}
    if activations.note:
        said["note"] = activations.note
    if activations.float32:
        said["float32"] = [{"reason": reason, "nodes": nodes} for reason, nodes in activations.float32.items()]
    return said


def _activations(path: Path, node: yaml.Node | None) -> Activations:
    if node is None:
        return Activations()
    found = _mapping(path, node, "'activations'", ("type",), ("note", "float32"))
    kind = str(_scalar(path, "type", found["type"], str))
    if kind not in ACTIVATIONS[1:]:
        raise PlanError(
            f"{_at(path, found['type'])}: unknown type of activations '{kind}'; one of {', '.join(ACTIVATIONS[1:])}"
        )
    note = str(_scalar(path, "note", found["note"], str)) if "note" in found else ""
    if "float32" not in found:
        return Activations(kind, note=note)
    if not isinstance(groups := found["float32"], yaml.SequenceNode):
        raise PlanError(f"{_at(path, groups)}: 'float32' must list reasons and nodes")
    stays: dict[str, list[str]] = {}
    for group in groups.value:
        entry = _mapping(path, group, "an entry of 'float32'", ("reason", "nodes"))
        nodes = _field(path, "nodes", entry["nodes"])
        stays.setdefault(_scalar(path, "reason", entry["reason"], str), []).extend(nodes)
    return Activations(kind, stays, note)


def _at(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _mapping(
    path: Path, node: yaml.Node | None, what: str, expected: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        where = str(path) if node is None else _at(path, node)
        raise PlanError(f"{where}: {what} must be a mapping; write a fresh plan with --stop-after plan")
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = _scalar(path, f"a key of {what}", key, str)
        if name not in (*expected, *optional):
            known = ", ".join((*expected, *optional))
            raise PlanError(f"{_at(path, key)}: unknown key '{name}' in {what}; known: {known}")
        if name in found:
            raise PlanError(f"{_at(path, key)}: '{name}' is given twice in {what}")
        found[name] = value
    missing = [key for key in expected if key not in found]
    if missing:
        raise PlanError(f"{_at(path, node)}: {what} lacks {', '.join(missing)}")
    return found


def _field(path: Path, key: str, node: yaml.Node) -> Any:
    if key in ("nodes", "linear_inputs"):
        if not isinstance(node, yaml.SequenceNode):
            raise PlanError(f"{_at(path, node)}: '{key}' must be a list of names")
        return [_scalar(path, key, item, str) for item in node.value]
    if key == "shapes":
        if not isinstance(node, yaml.MappingNode):
            raise PlanError(f"{_at(path, node)}: 'shapes' must map names to numbers")
        return {
            _scalar(path, "a key of 'shapes'", name, str): _scalar(path, f"shapes.{name.value}", item, int)
            for name, item in node.value
        }
    return _scalar(path, key, node, int if key == "residual_channels" else str)


def _scalar(path: Path, key: str, node: yaml.Node, kind: type) -> Any:
    if isinstance(node, yaml.ScalarNode):
        try:
            return kind(node.value)
        except ValueError:
            pass
    raise PlanError(f"{_at(path, node)}: '{key}' must be {'a number' if kind is int else 'text'}")
