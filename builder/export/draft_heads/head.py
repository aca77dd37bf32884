"""A head that drafts, and the hidden states that it reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trt_nvfp4.builder.errors import ModelFaultError


class Head(torch.nn.Module, ABC):
    """A language model of few layers whose embeddings are joined with a target's hidden states:
    (input_ids [batch, tokens], previous_hidden_states [batch, tokens, hidden_size]) -> what `model` gives.

    What else transformers' models have, such as `config`, is that of `model`. It trains as any module.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def joined(self, embeds: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """The input of the first layer, [batch, tokens, any]."""

    @abstractmethod
    def hidden_states(self) -> "HiddenStates":
        """Its own hidden states, which stand for the target's in the next step of a draft."""

    def forward(self, input_ids: torch.Tensor, previous_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        embeds = self.model.get_input_embeddings()(input_ids)
        return self.model(inputs_embeds=self.joined(embeds, previous_hidden_states), **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def assign(wrong: str, head: Head, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """Give the head its tensors, except those whose names begin with `prefix`. Raises ModelFaultError, which says
    what is `wrong`, where names or shapes differ from the head's."""
    own = {name: tensor for name, tensor in head.state_dict().items() if not prefix or not name.startswith(prefix)}
    shapes, given = ({name: list(tensor.shape) for name, tensor in each.items()} for each in (own, state))
    if differing := sorted(name for name in {**shapes, **given} if shapes.get(name) != given.get(name)):
        name = differing[0]
        raise ModelFaultError(f"{wrong}: {name} is {given.get(name, 'missing')}, expected {shapes.get(name, 'none')}")
    head.load_state_dict(dict(state), strict=not prefix, assign=True)


class HiddenStates(torch.nn.Module):
    """Hidden states of each token: what enters `parts` of a model, side by side, through `fuse` where there is one."""

    def __init__(self, parts: Sequence[torch.nn.Module], width: int, fuse: torch.nn.Module | None = None) -> None:
        """`width`: of the result's last axis."""
        super().__init__()
        self.parts, self.width, self.fuse = tuple(parts), width, fuse

    def forward(self, entered: Sequence[torch.Tensor]) -> torch.Tensor:
        """[batch, tokens, width], of what entered each part."""
        side_by_side = torch.cat(tuple(entered), -1) if len(entered) > 1 else entered[0]
        found: torch.Tensor = side_by_side if self.fuse is None else self.fuse(side_by_side)
        return found


@contextmanager
def recorded(hidden: HiddenStates | None) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Gives a function whose result are the hidden states of the model's last run within, in a list; [] of None."""
    parts = () if hidden is None else hidden.parts
    entered: dict[int, torch.Tensor] = {}

    def record(number: int, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[number] = args[0] if args else kwargs["hidden_states"]

    hooks = [
        part.register_forward_pre_hook(partial(record, number), with_kwargs=True) for number, part in enumerate(parts)
    ]
    try:
        yield lambda: [] if hidden is None else [hidden([entered[number] for number in range(len(parts))])]
    finally:
        for hook in hooks:
            hook.remove()


def with_hidden_states(model: Any, hidden: HiddenStates | None, **inputs: Any) -> list[torch.Tensor]:
    """[logits, hidden states] of a model for all tokens; only logits where `hidden` is None."""
    with recorded(hidden) as found:
        logits = model(**inputs).logits
    return [logits, *found()]


def last_hidden_states(model: Any) -> HiddenStates:
    """The input of a language model's output embeddings, behind its final norm."""
    head = model.get_output_embeddings()
    return HiddenStates([head], head.weight.shape[1])
