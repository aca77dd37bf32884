"""Which class of kernels serves a planned subgraph on its target, and why; docs/figures/tactics.md says the same."""

from collections.abc import Iterator, Mapping

from trt_nvfp4.graph_passes.lowerings.decision import AS_GIVEN, Capabilities
from trt_nvfp4.graph_passes.planning.kinds.kind import KernelClass
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.planned import PlannedSubgraph


def kernel_class(entry: PlannedSubgraph, capabilities: Capabilities) -> KernelClass | None:
    """The kernels of a replaced subgraph; None for one that stays as it is, or was put in by hand."""
    return None if entry.decision in AS_GIVEN else kind_of(entry).kernels(entry, capabilities)


def note_kernels(entries: list[PlannedSubgraph], capabilities: Capabilities) -> dict[str, KernelClass]:
    """Writes into each entry which kernels serve it; returns the classes of the replaced ones by name."""
    found = {}
    for entry in entries:
        kernels = kernel_class(entry, capabilities)
        entry.kernels = "" if kernels is None else str(kernels)
        if kernels is not None:
            found[entry.name] = kernels
    return found


def slow_kernels(kernels: Mapping[str, KernelClass]) -> Iterator[str]:
    """A warning for each reason for which subgraphs, by name, run on generic kernels."""
    groups: dict[KernelClass, list[str]] = {}
    for name, found in kernels.items():
        if found.is_generic:
            groups.setdefault(found, []).append(name)
    for found, names in groups.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield (f"generic kernels, correct and slow, serve {', '.join(names[:2])}{more}: {found.why}; {found.remedy}")
