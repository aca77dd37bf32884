"""Searches the MoE block of one router: its experts, where it ends, and its routing, by the values that it makes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, rank
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.patterns.isolation import escaping_use
from trt_nvfp4.graph_passes.patterns.mlp import match_mlp
from trt_nvfp4.graph_passes.patterns.moe.context import Context, variables
from trt_nvfp4.graph_passes.patterns.moe.experts import experts_of, stack_size, stacked_mlps
from trt_nvfp4.graph_passes.patterns.moe.external_routing import given_candidates, routing_values
from trt_nvfp4.graph_passes.patterns.moe.fit import Fit, routing_constants, scaled_experts
from trt_nvfp4.graph_passes.patterns.moe.probe import Probe, ProbeError
from trt_nvfp4.graph_passes.patterns.moe.routing import Choice, candidates
from trt_nvfp4.graph_passes.patterns.moe.selected_weights import ALIASES
from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp, Moe, Routing
from trt_nvfp4.graph_passes.subgraphs.values import as_torch, constant
from trt_nvfp4.plugins.ops.moe_routing import MAX_EXPERTS, MAX_TOP_K

# What gives every chosen expert the row of its token.
_REPEATING = ("Expand", "Gather", "GatherND", "Tile")


@dataclass(frozen=True)
class UnsupportedMoe:
    """A block that looks like an MoE block and cannot be replaced; `reason` names the node in the way."""

    router: Linear
    choices: tuple[Choice, ...]
    reason: str


class BlockMatcher:
    """The search for the block of one router, and of `count` experts that read `x`, with a row for each of its rows.

    `logits` are the router's output, or what is made of it before it is scored (Laguna caps it). `other_x` is then what
    the experts seem to read instead of x, where they do not read that.
    """

    def __init__(
        self,
        context: Context,
        router: Linear,
        choices: Sequence[Choice],
        x: ir.Value,
        logits: ir.Value,
        count: int,
    ) -> None:
        self._context, self._router, self._choices, self._logits = context, router, tuple(choices), logits
        self._experts_count = count
        # x, and the same values in other shapes and types on the way to it.
        self._aliases = [x]
        while is_op(node := self._aliases[-1].producer(), *ALIASES):
            self._aliases.append(operand(node, 0))
        self._x = self._aliases[-1]
        self._inside: set[ir.Value] = {self._x, logits}
        self._escape: str | None = None  # how what the logits decide is seen outside of any block
        self.other_x: ir.Value | None = None

    def match(self) -> Moe | UnsupportedMoe | None:
        """The widest block whose values are those of an MoE, or why it cannot be replaced; None if it is not an MoE."""
        closures = {value: self._closure(value) for value in self._merges()}
        try:
            for value, nodes in closures.items():
                experts, shared = self._experts(nodes)
                if experts:
                    self.other_x = self._rows_behind(experts[0].up.x)
                    self._check_counts(experts)
                    merges = list(closures)[list(closures).index(value) :]
                    return self._fit(experts, shared, {merge: closures[merge] for merge in merges})
            if self._escape is not None and (experts := self._experts(self._inside_nodes())[0]):
                if len(experts) >= 2 * self._experts_count:
                    self._check_counts(experts)
                raise _UnsupportedError(f"an intermediate is used elsewhere: {self._escape}")
        except _UnsupportedError as error:
            return UnsupportedMoe(self._router, self._choices, str(error))
        return None

    def _merges(self) -> Iterator[ir.Value]:
        """Values on which everything that depends on the logits runs together, until another tensor comes in."""
        routed: set[ir.Value] = {self._logits}
        pending: dict[ir.Value, int] = {}
        producers = (value.producer() for value in (self._x, self._logits))
        first = min(-1 if producer is None else self._context.position[producer] for producer in producers)
        for node in self._context.nodes[first + 1 :]:
            inputs = variables(node)
            is_inside = all(value in self._inside or value in self._context.shapes for value in inputs)
            if is_inside and inputs:
                self._inside.update(node.outputs)
            if routed.isdisjoint(inputs):
                continue
            if not is_inside:
                known = self._inside | self._context.shapes
                self.other_x = self._rows_behind(next(value for value in inputs if value not in known))
                break
            routed.update(node.outputs)
            for value in inputs:
                pending[value] = pending.get(value, 0) - 1
            pending |= {value: len(value.uses()) + value.is_graph_output() for value in node.outputs}
            pending = {value: count for value, count in pending.items() if count > 0}
            if len(node.outputs) == 1 and list(pending) == [node.outputs[0]]:
                yield node.outputs[0]
        if len(pending) > 1:
            self._escape = escaping_use(pending, self._inside_nodes())

    def _rows_behind(self, value: ir.Value) -> ir.Value | None:
        """The tensor whose rows `value` repeats, other than x, with as many dimensions as the logits."""
        rows = value
        while is_op(node := value.producer(), *ALIASES, *_REPEATING):
            value = operand(node, 0)
            if is_op(node, *_REPEATING):
                rows = value
        while rank(rows) != rank(self._logits) and is_op(node := rows.producer(), *ALIASES):
            rows = operand(node, 0)
        return rows if rank(rows) == rank(self._logits) and rows not in self._aliases else None

    def _inside_nodes(self) -> set[ir.Node]:
        readers = {use.node for value in self._inside for use in value.uses()}
        return {node for node in readers if node.outputs and node.outputs[0] in self._inside}

    def _closure(self, output: ir.Value) -> list[ir.Node]:
        """The nodes that compute `output` from x, the logits, constants and shapes of anything, in graph order."""
        seen: set[ir.Node] = set()
        pending = [output]
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is None or node in seen or value in (self._x, self._logits):
                continue
            seen.add(node)
            if is_op(node, "Shape") and operand(node, 0) not in self._inside:
                continue
            pending += variables(node)
        return sorted(seen, key=self._context.position.__getitem__)

    def _experts(self, nodes: Iterable[ir.Node]) -> tuple[tuple[Mlp, ...], Mlp | None]:
        """The MLPs among `nodes`, one per expert, and one that every token goes through."""
        inside = set(nodes)
        stacked = {y: linear for y, linear in self._context.stacked.items() if linear.multiply in inside}
        own = self._own_mlps(inside)
        if stacked:
            matches = stacked_mlps(stacked, inside)
            if not matches:
                return (), None  # the block ends further on
            if len(matches) > 1:
                names = ", ".join(f"'{mlp.down.multiply.name}'" for mlp, _ in matches)
                raise _UnsupportedError(f"it has several MLPs with stacked experts, which end in {names}")
            (mlp, unsupported), size = matches[0], stack_size(matches[0][0].up)
            if unsupported is not None:
                raise _UnsupportedError(unsupported)
            if size != self._experts_count or stack_size(mlp.down) != size:
                found = (
                    f"weights '{mlp.up.weight.stored.name}' and '{mlp.down.weight.stored.name}' stack {size} and "
                    f"{stack_size(mlp.down)} experts, and the router '{self._router.multiply.name}' chooses among "
                    f"{self._experts_count}"
                )
                if self._picks(mlp.up) or self._picks(mlp.down):
                    raise ModelError(f"{found}; export the model with all experts")
                raise _UnsupportedError(f"{found}; NVFP4MoE needs a router that chooses among exactly these experts")
            return experts_of(mlp), own[0] if own else None
        if len(own) < 2:
            return (), None
        for_all = [mlp for mlp in own if mlp.x in self._aliases]
        if len(own) == self._experts_count + 1 and len(for_all) == 1:
            return tuple(mlp for mlp in own if mlp is not for_all[0]), for_all[0]
        return tuple(own), None

    def _picks(self, linear: Linear) -> bool:
        """Whether the chosen numbers pick matrices of `linear` unchecked: one of them may not exist."""
        for node in linear.weight_nodes:
            if is_op(node, "Gather", "GatherND"):
                indices = operand(node, 1)
                while is_op(alias := indices.producer(), *ALIASES):
                    indices = operand(alias, 0)
                if any(indices.producer() is choice.node for choice in self._choices):
                    return True
        return False

    def _own_mlps(self, inside: set[ir.Node]) -> list[Mlp]:
        """MLPs with matrices of their own."""
        found = []
        for linear in self._context.linears.values():
            match = match_mlp(linear, self._context.linears) if linear.multiply in inside else None
            if match is not None and all(part.multiply in inside for part in match[0].linears):
                mlp, unsupported = match
                if unsupported is not None:
                    raise _UnsupportedError(f"of the MLP that ends in '{linear.multiply.name}', {unsupported}")
                found.append(mlp)
        return found

    def _check_counts(self, experts: Sequence[Mlp]) -> None:
        count = self._experts_count
        for choice in self._choices:
            if choice.k > choice.size:
                raise ModelError(f"{choice} takes {choice.k} of {choice.size} experts or groups")
        if len(experts) != count:
            advice = "export the model with all of them (transformers: experts_implementation='batched_mm')"
            if len(experts) > count:
                advice = "NVFP4MoE serves one block per router, with one shared expert at most"
            raise _UnsupportedError(
                f"the router '{self._router.multiply.name}' chooses among {count} experts, and the block has "
                f"{len(experts)}; {advice}"
            )
        top_k = max(choice.k for choice in self._choices if choice.size == count)
        if count > MAX_EXPERTS or top_k > MAX_TOP_K:
            raise _UnsupportedError(
                f"NVFP4MoE serves at most {MAX_TOP_K} of {MAX_EXPERTS} experts per token, here are {top_k} of {count}"
            )
        features = experts[0].up.weight.shape[1]
        if self._x.shape is not None and self._x.shape[-1] != features:
            raise _UnsupportedError(
                f"its experts read rows of {features}, and '{self._x.name}' has {self._x.shape[-1]}"
            )
        first = _signature(experts[0])
        for index, mlp in enumerate(experts):
            if _signature(mlp) != first:
                raise _UnsupportedError(
                    f"its experts differ: expert {index}, which ends in node '{mlp.down.multiply.name}', is "
                    f"{_description(mlp)}, expert 0 is {_description(experts[0])}"
                )

    def _fit(self, experts: tuple[Mlp, ...], shared: Mlp | None, closures: Mapping[ir.Value, list[ir.Node]]) -> Moe:
        """The block that ends in the last of the merges whose values an MoE of these experts has."""
        nodes = list(closures.values())[-1]
        present = set(nodes)
        choices = [choice for choice in self._choices if choice.node in present]
        choices.sort(key=lambda choice: choice.size == self._experts_count)  # stable: the last one chooses experts
        if not choices or choices[-1].size != self._experts_count:
            raise _UnsupportedError("its experts do not depend on a TopK or ArgMax over all of them")
        linears = [self._context.multiplies[node] for node in nodes if node in self._context.multiplies]
        try:
            probe = Probe(self._x, self._logits, choices[-1].k, nodes, linears, self._context.opset)
            runs = probe.run([choices[-1].keys, *closures])
        except ProbeError as error:
            if len(closures) > 1:  # the last may take a shape that x does not have
                return self._fit(experts, shared, dict(list(closures.items())[:-1]))
            raise _UnsupportedError(str(error)) from error
        keys, *values = map(_rows, zip(*runs, strict=True))
        keys = keys if choices[-1].largest else -keys
        shapes = [tuple(value.shape) for value in runs[0][1:]]
        merges = list(zip(closures, closures.values(), values, shapes, strict=True))
        numbers, vectors = routing_constants(nodes, len(experts))
        routings = candidates(choices, keys, probe.samples, vectors)
        fits = [Fit(probe, experts, routings, numbers)]
        scaled = scaled_experts(experts, (values for _, values in vectors))
        for fit in itertools.chain(fits, (Fit(probe, each, routings, numbers) for each in scaled)):
            ends = self._ends(fit, shared, merges)
            if ends:
                return self._block(probe, fit.experts, ends, closures)
        own = routing_values(nodes, linears, self._logits)
        given = given_candidates(own, probe.run(own), torch.from_numpy(probe.samples.logits))
        ends = self._ends(Fit(probe, experts, list(given), numbers), shared, merges)
        if ends:
            return self._block(probe, experts, ends, closures)
        raise _UnsupportedError(self._misfit(fits[0], choices[-1]))

    def _ends(
        self,
        fit: Fit,
        shared: Mlp | None,
        merges: Iterable[tuple[ir.Value, list[ir.Node], torch.Tensor, tuple[int, ...]]],
    ) -> "list[_End]":
        """Those of `merges` (value, nodes, values, shape) that the experts of `fit` make, and how."""
        added = fit.shared(shared, None) if shared is not None else torch.zeros(())
        routing, gate, total = None, None, torch.zeros(())
        ends: list[_End] = []
        for merge, inside, y, shape in merges:
            if routing is None:
                routing = fit.routing(y - added) if added.shape in ((), y.shape) else None
            elif not fit.same(y, total):
                scaled = fit.routing(y) if shared is None else None
                extended = self._shared(inside, fit.experts, shared)
                if scaled is not None:
                    routing = scaled
                elif extended is not None and fit.same(y, total + fit.shared(*extended)):
                    shared, gate = extended
                else:
                    break
            if routing is not None:
                ends.append(_End(merge, shape, routing, shared, gate))
                total = y
        return ends

    @staticmethod
    def _misfit(fit: Fit, choice: Choice) -> str:
        """Why no routing makes the block's values."""
        biases = {linear.bias.stored for mlp in fit.experts for linear in mlp.linears if linear.bias is not None}
        for bias in sorted(biases, key=lambda value: value.name or ""):
            if not as_torch(constant(bias)).isfinite().all():
                return f"bias '{bias.name}' holds NaN or Inf; repair the checkpoint"
        if fit.exception is not None:
            return (
                f"what follows {choice} is a weighted sum of the chosen experts for typical tokens, but not for "
                f"{fit.exception}"
            )
        return f"what follows {choice} is not a weighted sum of the experts that it chooses"

    def _shared(
        self, nodes: Iterable[ir.Node], experts: Sequence[Mlp], known: Mlp | None
    ) -> tuple[Mlp, Linear | None] | None:
        """The MLP among `nodes` beside the experts, and the linear to one number that gates it."""
        if known is not None:
            return None
        inside = set(nodes)
        routed = {linear.multiply for mlp in experts for linear in mlp.linears}
        others = [mlp for mlp in self._own_mlps(inside) if mlp.down.multiply not in routed]
        if (
            len(others) != 1
            or others[0].x not in self._aliases
            or _signature(others[0])[:4] != _signature(experts[0])[:4]
        ):
            return None
        gates = [
            linear
            for linear in self._context.linears.values()
            if linear.multiply in inside
            and linear.weight.shape[0] == 1
            and linear.bias is None
            and linear.x in self._aliases
        ]
        return others[0], gates[0] if gates else None

    def _block(
        self,
        probe: Probe,
        experts: tuple[Mlp, ...],
        ends: "Sequence[_End]",
        closures: Mapping[ir.Value, list[ir.Node]],
    ) -> Moe:
        """The widest block whose output can take the place of one of `ends`."""
        dtype = experts[0].up.weight.dtype
        x = next((value for value in self._aliases if value.dtype == dtype and self._as_router_reads(value)), None)
        if x is None:
            raise _UnsupportedError(f"the router's input '{self._router.x.name}' has no copy of type {dtype.name}")
        leading = probe.shape_of(self._logits)[:-1]
        widest = [end for end in reversed(ends) if end.y.dtype in (dtype, None)]
        # Best an output in the router's own shape, as long as it leaves no shared expert outside.
        widest.sort(key=lambda end: (end.shared is None, end.shape[:-1] != leading))
        widest = [end for end in widest if end.shape[:-1] in (leading, probe.shape_of(self._x)[:-1])]
        if not widest:
            raise _UnsupportedError(f"its output '{ends[0].y.name}' has another type than its experts")

        def block(end: _End, routed: Moe | None = None) -> Moe:
            nodes = self._removable(end.y, closures[end.y], (x, *(end.routing.given or ())))
            self._check_isolated(experts if end.shared is None else (*experts, end.shared), nodes, closures[end.y])
            return Moe(
                x=x,
                logits=self._logits,
                y=end.y,
                y_like=None if end.shape[:-1] == leading else self._x,
                router=self._router,
                routing=end.routing,
                experts=experts,
                shared=end.shared,
                shared_gate=end.gate,
                nodes=nodes,
                routed=routed,
            )

        routed_only = next((end for end in widest if end.shared is None), None)
        return block(widest[0], None if routed_only in (None, widest[0]) else block(routed_only))

    @staticmethod
    def _check_isolated(mlps: Iterable[Mlp], nodes: Sequence[ir.Node], closure: Sequence[ir.Node]) -> None:
        multiplies = {linear.multiply for mlp in mlps for linear in mlp.linears}
        if not multiplies <= set(nodes):
            of_experts: set[ir.Value] = set()
            for node in closure:
                if node in multiplies or not of_experts.isdisjoint(variables(node)):
                    of_experts.update(node.outputs)
            kept = [v for node in closure if node not in nodes for v in node.outputs if v in of_experts]
            raise _UnsupportedError(f"an intermediate is used elsewhere: {escaping_use(kept, set(closure))}")

    def _as_router_reads(self, value: ir.Value) -> bool:
        """`value` has the leading dimensions of the router's input."""
        for alias in self._aliases:
            if alias is value:
                return True
            if not is_op(alias.producer(), "Cast", "Identity"):
                return False
        return False

    @staticmethod
    def _removable(y: ir.Value, closure: Sequence[ir.Node], sources: Iterable[ir.Value]) -> tuple[ir.Node, ...]:
        """The nodes of `closure`, in order, that nothing needs once something else computes y from `sources`."""
        kept = {source.producer() for source in sources}
        removable: set[ir.Node] = set()
        for node in reversed(closure):
            if node not in kept and all(
                value is y or (not value.is_graph_output() and all(use.node in removable for use in value.uses()))
                for value in node.outputs
            ):
                removable.add(node)
        return tuple(node for node in closure if node in removable)


@dataclass(frozen=True)
class _End:
    """A value that is the block's, its shape in the probe, the routing and the shared expert that are in it."""

    y: ir.Value
    shape: tuple[int, ...]
    routing: Routing
    shared: Mlp | None
    gate: Linear | None


def _rows(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all runs as [tokens, features]; empty where their rows differ in length."""
    rows = [value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1) for value in runs]
    return torch.cat(rows) if len({row.shape for row in rows}) == 1 else torch.zeros(0)


def _signature(mlp: Mlp) -> tuple[object, ...]:
    """The properties that all experts of a block share."""
    return mlp.gate is not None, mlp.activation, mlp.alpha, mlp.limit, mlp.up.weight.shape, mlp.down.weight.shape


def _description(mlp: Mlp) -> str:
    inputs, intermediate, outputs = mlp.up.weight.shape[1], mlp.up.weight.shape[0], mlp.down.weight.shape[0]
    return f"{inputs}-{intermediate}-{outputs} {mlp.activation}{'' if mlp.gate is None else ', gated'}"


class _UnsupportedError(Exception):
    """Why a block cannot be replaced."""
