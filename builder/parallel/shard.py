"""One rank's share of a transformers model, by the model's own tensor-parallel plan (`tp_plan`).

Every rank keeps the rows of Q, K, V, gate and up, or the columns of output and down projections, that are its own; what
it computes of the latter is a part of a sum over all ranks. Embeddings, norms and routers are whole on every rank.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.parallel.collective_ops import all_reduce


@dataclass(frozen=True)
class Rank:
    """Number `index` of `count` ranks, which hold the experts of a mixture in `spread` equal shares: 1, and every rank
    has a part of each expert; `count`, and it has whole experts."""

    index: int
    count: int
    spread: int = 1

    @property
    def within_share(self) -> "Rank":
        """Its place among the ranks with the same experts."""
        sharing = self.count // self.spread
        return Rank(self.index % sharing, sharing)

    @property
    def share(self) -> int:
        """Which share of a mixture's experts it has, or a part of."""
        return self.index * self.spread // self.count

    def experts(self, count: int, where: str) -> range:
        """Which of a mixture's `count` experts it holds. Raises UsageError."""
        if count % self.spread:
            raise UsageError(f"--parallel ep={self.spread}: {where} has {count} experts, which cannot be divided by it")
        size = count // self.spread
        return range(self.share * size, (self.share + 1) * size)

    def part(self, tensor: Tensor, axis: int, what: str) -> Tensor:
        """This rank's of `count` equal parts of `tensor` along an axis. Raises UsageError."""
        size = tensor.shape[axis]
        if size % self.count:
            raise UsageError(
                f"--parallel tp={self.count}: {what} has {size} rows or columns to split, not a multiple of it"
            )
        return tensor.chunk(self.count, dim=axis)[self.index].clone()


#: Styles of the plan that leave a module whole.
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "ep_router"}


#: The style of a module with stacked experts, whose outputs are summed.
_MIXTURE = "moe_tp_experts"


def shard(model: Any, rank: Rank, where: str) -> None:
    """Cut `model` down to the share of `rank`, in place. `where` names it in messages.

    Raises BuilderError: model, for a family without a plan or one that says what is not known here; usage, where
    heads or widths cannot be divided by the number of ranks.
    """
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not plan:
        raise ModelFaultError(
            f"{where}: transformers has no tensor-parallel plan for {type(model).__name__}, so --parallel cannot "
            "split it; build it for one GPU"
        )
    _check_heads(model.config.get_text_config(decoder=True), plan, rank)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    found = {name: style for pattern, style in plan.items() for name in _matching(pattern, (*modules, *parameters))}
    mixtures = {name for name, style in found.items() if style == _MIXTURE} if rank.spread > 1 else set()
    if rank.spread > 1 and not mixtures:
        raise UsageError(f"--parallel ep={rank.spread}: {where} has no experts to spread over ranks; leave ep out")
    for name in sorted(mixtures):
        _spread(modules[name], rank, f"{where}: {name}")
    for name, style in found.items():
        of_experts = name.rpartition(".")[0] in mixtures
        mine = rank.within_share if of_experts else rank
        if style not in _WHOLE and not (of_experts and mine.count == 1):
            _style(style, where, name)(modules, name, mine)
    for module in modules.values():
        _divide_heads(module, rank)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    return [name for name in names if matches(name)]


def _spread(experts: Any, rank: Rank, where: str) -> None:
    """Leave the rank's experts of a stack. Every rank chooses among all; of the weights that this gives to all experts
    it takes its own, which are 0 for those that were not chosen."""
    total = int(experts.num_experts)
    own = rank.experts(total, where)
    for key, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.shape[0] != total:
            raise ModelFaultError(f"{where}: {key} is {list(parameter.shape)}, expected {total} experts")
        setattr(experts, key, _parameter(parameter[own.start : own.stop].clone()))
    experts.num_experts = len(own)

    def dispatch(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
        hidden, chosen, weights = (*given, *named.values())
        of_all = torch.zeros(*weights.shape[:-1], total, dtype=weights.dtype, device=weights.device)
        mine = of_all.scatter(-1, chosen, weights)[..., own.start : own.stop]
        mine, chosen = mine.topk(min(weights.shape[-1], len(own)), dim=-1)
        return (hidden, chosen, mine), {}

    experts.register_forward_pre_hook(dispatch, with_kwargs=True)


def _style(style: str, where: str, name: str) -> Callable[[dict[str, Any], str, Rank], None]:
    styles = {
        "colwise": _colwise,
        "rowwise": _rowwise,
        "rowwise_rep": _rowwise,
        "packed_colwise": _packed_colwise,
        "colwise_rep": _head,
        "colwise_gather_output": _head,
        _MIXTURE: _summed,
        "all_reduce": _summed,
    }
    if style not in styles:
        raise ModelFaultError(
            f"{where}: its tensor-parallel plan splits {name} as {style!r}, which --parallel does not know; build it "
            "for one GPU"
        )
    return styles[style]


def _colwise(modules: dict[str, Any], name: str, rank: Rank) -> None:
    """Rows of a linear's weight, hence columns of its output."""
    module = modules[name]
    heads = _kv_heads(modules, name, rank)
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, _parameter(_kv_part(parameter, heads, rank) if heads else rank.part(parameter, 0, name)))
    if isinstance(module, nn.Linear):
        module.out_features = module.weight.shape[0]


def _kv_heads(modules: dict[str, Any], name: str, rank: Rank) -> int | None:
    """The heads of a projection of keys or values that has fewer than there are ranks; else None."""
    attention = modules[name.rpartition(".")[0]]
    heads: int | None = getattr(getattr(attention, "config", None), "num_key_value_heads", None)
    is_kv = name.endswith((".k_proj", ".v_proj"))
    return heads if is_kv and heads is not None and heads < rank.count else None


def _kv_part(parameter: Tensor, heads: int, rank: Rank) -> Tensor:
    """The one head that this rank shares with others."""
    return parameter.chunk(heads, dim=0)[rank.index * heads // rank.count].clone()


def _rowwise(modules: dict[str, Any], name: str, rank: Rank) -> None:
    """Columns of a linear's weight; of stacked experts [experts, hidden, width], which are summed later."""
    if name not in modules:
        owner, key = modules[name.rpartition(".")[0]], name.rpartition(".")[2]
        parameter = getattr(owner, key)
        if key.endswith("bias"):  # added once
            setattr(owner, key, _parameter(parameter if rank.index == 0 else torch.zeros_like(parameter)))
        else:
            setattr(owner, key, _parameter(rank.part(parameter, _width_axis(owner, parameter, down=True), name)))
        return
    module = modules[name]
    module.weight = _parameter(rank.part(module.weight, 1, name))
    module.in_features = module.weight.shape[1]
    bias = module.bias
    module.bias = None

    def behind(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        total: Tensor = all_reduce(y, rank.count)
        return total if bias is None else total + bias

    module.register_forward_hook(behind)


def _width_axis(owner: Any, parameter: Tensor, down: bool) -> int:
    """Stacked experts are [experts, out, in], or transposed in some families, whose modules say so."""
    return 1 if getattr(owner, "is_transposed", False) == down else parameter.dim() - 1


def _packed_colwise(modules: dict[str, Any], name: str, rank: Rank) -> None:
    """Rows of gate and of up, which are one above the other in a stack of experts' matrices, or in one linear."""
    is_module = name in modules
    owner, key = (modules[name], "weight") if is_module else (modules[name.rpartition(".")[0]], name.rpartition(".")[2])
    parameter = getattr(owner, key)
    axis = 0 if is_module else 1
    if getattr(owner, "is_transposed", False) or getattr(owner, "is_concatenated", True) is False:
        raise ModelFaultError(f"{name}: gate and up of its experts are interleaved, which --parallel does not split")
    halves = [rank.part(half, axis, name) for half in parameter.chunk(2, dim=axis)]
    setattr(owner, key, _parameter(torch.cat(halves, dim=axis)))


def _head(modules: dict[str, Any], name: str, rank: Rank) -> None:
    """Rows of the vocabulary; a rank's logits stand among zeros, so that a sum joins them."""
    module = modules[name]
    vocabulary = module.weight.shape[0]
    share = -(-vocabulary // rank.count)
    first, last = min(rank.index * share, vocabulary), min((rank.index + 1) * share, vocabulary)
    module.weight = _parameter(module.weight[first:last].clone())
    if module.bias is not None:
        module.bias = _parameter(module.bias[first:last].clone())
    module.out_features = last - first
    module.vocabulary = vocabulary  # of its logits, once the ranks' are joined
    module.register_forward_hook(
        lambda _, __, y: all_reduce(nn.functional.pad(y, (first, vocabulary - last)), rank.count)
    )


def _summed(modules: dict[str, Any], name: str, rank: Rank) -> None:
    """A module whose parts of sums are added up behind it."""
    modules[name].register_forward_hook(lambda _, __, y: all_reduce(y, rank.count))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


#: How configurations call the number of a mixture's experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_division(config: Any, rank: Rank, where: str) -> None:
    """Raise UsageError where the model of a transformers configuration cannot be divided by the number of
    ranks, as far as the configuration tells."""
    text = config.get_text_config(decoder=True)
    _check_heads(text, getattr(text, "base_model_tp_plan", None) or {}, rank)
    experts = next((value for key in _EXPERTS if isinstance(value := getattr(text, key, None), int)), None)
    if experts is not None:
        rank.experts(experts, where)


def _check_heads(config: Any, plan: Mapping[str, str], rank: Rank) -> None:
    split = any(style == "colwise" and pattern.endswith("q_proj") for pattern, style in plan.items())
    heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if not split or heads is None:
        return
    fits_kv = kv_heads is None or kv_heads % rank.count == 0 or rank.count % kv_heads == 0
    if heads % rank.count or not fits_kv:
        raise UsageError(
            f"--parallel tp={rank.count}: {heads} attention heads and {kv_heads or heads} of keys and values cannot be "
            "divided; choose a number that divides the heads, and divides those of keys and values or is a multiple"
        )


def _divide_heads(module: Any, rank: Rank) -> None:
    """Groups of queries of a head of keys that several ranks share."""
    heads = getattr(getattr(module, "config", None), "num_key_value_heads", None)
    if (
        heads is not None
        and heads < rank.count
        and hasattr(module, "num_key_value_groups")
        and hasattr(module, "k_proj")
    ):
        module.num_key_value_groups = module.config.num_attention_heads // rank.count
