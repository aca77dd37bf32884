"""Which subgraphs a plan may replace."""

import re
from collections.abc import Collection

from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


class Selection:
    """Selects by kind, and by regular expressions searched in the names of a subgraph and of its nodes.

    `always`: kinds that are selected by name only.

    Raises ValueError for a pattern that is not a regular expression.
    """

    def __init__(
        self, kinds: Collection[str], include: str | None, exclude: str | None, always: Collection[str] = ()
    ) -> None:
        self._kinds, self._always = kinds, always
        self._include, self._exclude = _pattern("include", include), _pattern("exclude", exclude)

    def unselected(self, subgraph: Subgraph | PlannedSubgraph) -> Reason | None:
        """The Reason why a subgraph is not selected; None where it is."""
        if subgraph.kind not in (*self._kinds, *self._always):
            text = f"--kinds names {', '.join(self._kinds)}, not {subgraph.kind}"
            return Reason(ReasonCode.KIND, text)
        return self.unselected_by_name(subgraph)

    def unselected_by_name(self, subgraph: Subgraph | PlannedSubgraph) -> Reason | None:
        """The same, whatever its kind."""
        names = (subgraph.name, *subgraph.nodes)
        if self._include is not None and not any(map(self._include.search, names)):
            return Reason(ReasonCode.NOT_INCLUDED, f"not matched by --include {self._include.pattern}")
        if self._exclude is not None and any(map(self._exclude.search, names)):
            return Reason(ReasonCode.EXCLUDED, f"matched by --exclude {self._exclude.pattern}")
        return None


def _pattern(option: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--{option} {pattern}: not a regular expression: {error}") from error
