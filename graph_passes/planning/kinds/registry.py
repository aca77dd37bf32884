"""Every kind of subgraph that plans know, and how `--kinds` selects them."""

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType

from trt_nvfp4.graph_passes.planning.kinds.attention import Attention
from trt_nvfp4.graph_passes.planning.kinds.by_hand import ByHand
from trt_nvfp4.graph_passes.planning.kinds.decoder_layer import DecoderLayer
from trt_nvfp4.graph_passes.planning.kinds.kind import Kind
from trt_nvfp4.graph_passes.planning.kinds.products import GatedMlp, Linear, Mlp, Moe
from trt_nvfp4.graph_passes.planning.kinds.recurrent import Recurrent
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.planning.selection import Selection
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph

_KINDS = (Moe(), GatedMlp(), Mlp(), Linear(), DecoderLayer(), Attention(), Recurrent(), ByHand())
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _KINDS})
DEFAULT_KINDS = tuple(name for name, kind in KINDS.items() if kind.selection == "default")
#: What `--kinds all` means.
ALL_KINDS = tuple(name for name, kind in KINDS.items() if kind.selection in ("default", "all"))
#: What `--kinds` may name.
SELECTABLE_KINDS = tuple(name for name, kind in KINDS.items() if kind.selection != "always")


def kind_of(subgraph: Subgraph | PlannedSubgraph) -> Kind:
    """The kind of a subgraph, or of a plan's entry."""
    return KINDS[subgraph.kind]


def select(kinds: Collection[str], include: str | None, exclude: str | None) -> Selection:
    """A checked selection; for the arguments see `PlanOptions`.

    Raises ValueError without a kind, for an unknown one, or for a pattern that is not a regular expression.
    """
    unknown = sorted(set(kinds) - set(SELECTABLE_KINDS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], SELECTABLE_KINDS, 1)
        hint = f"did you mean '{near[0]}'? One" if near else "one"
        raise ValueError(f"unknown kind '{unknown[0]}'; {hint} of {', '.join(SELECTABLE_KINDS)}")
    if not kinds:
        raise ValueError(f"no kind of subgraph to replace; name some of {', '.join(SELECTABLE_KINDS)}")
    always = set(KINDS) - set(SELECTABLE_KINDS)
    return Selection(kinds, include, exclude, always)
