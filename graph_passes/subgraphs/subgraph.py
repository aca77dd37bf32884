"""A candidate for replacement: what the patterns find and a plan decides on. Each kind is a class of its own."""

from dataclasses import dataclass
from typing import ClassVar

from trt_nvfp4.graph_passes.subgraphs.parts import FirstProducts, Linear, Mlp
from trt_nvfp4.graph_passes.subgraphs.reasons import Reason, ReasonCode


@dataclass(frozen=True, kw_only=True)
class Subgraph:
    """One candidate for replacement.

    Attributes:
        kind: its kind's name in plan files, reports and on the command line.
        name: unique in the model and stable; the name of the node that replaces the subgraph.
        nodes: the names of the nodes to be replaced, in graph order.
        input, output: tensor names; of joined linears, `output` is the first one's.
        shapes: sizes by name; each kind says which.
        activation: a member of `trt_nvfp4.plugins.ops.Activation` in lower case, or the operators that were met; "" for
            kinds without one.
        dtype: of the activations: "float32", "float16" or "bfloat16".
        unsupported: why it is not replaced; None if it is. With the code FEEDS_A_CHOICE an edited plan may still
            replace it.
    """

    kind: ClassVar[str]

    name: str
    nodes: tuple[str, ...]
    input: str
    output: str
    shapes: dict[str, int]
    activation: str
    dtype: str
    unsupported: Reason | None = None

    @property
    def can_be_replaced(self) -> bool:
        """Whether a plan may replace it."""
        return self.unsupported is None or self.unsupported.code == ReasonCode.FEEDS_A_CHOICE

    @property
    def op(self) -> str:
        """The NVFP4 or attention plugin that serves it."""
        raise NotImplementedError

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every linear of the subgraph, gate before up before down."""
        return ()

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """Its MLPs, experts included."""
        return ()

    @property
    def matrices(self) -> list[tuple[Linear, ...]]:
        """The linears of each weight that an op takes: gate with up, joined linears, other linears by themselves.

        Empty for stacks of experts.
        """
        return []

    @property
    def checkpoint_matrices(self) -> list[tuple[Linear, ...]]:
        """The linears of each matrix that a checkpoint holds or does not hold as a whole."""
        return self.matrices

    @property
    def first_products(self) -> list[FirstProducts]:
        """The products that read what the subgraph reads, by input."""
        return []

    @property
    def linear_inputs(self) -> list[str]:
        """The names of the tensors whose statistics serve the subgraph: what its linears multiply."""
        return list(dict.fromkeys(linear.observed for linear in self.linears))
