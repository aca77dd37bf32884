"""A plugin host that runs each node on a library of just the kernels that it needs, as engines do."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.plugins.compile.kernel_groups import OpUse, all_groups, groups_of
from trt_nvfp4.plugins.host import PluginHost, Session
from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS, OpError

_TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class SplitHost:
    """Stands in for a PluginHost; what is not about one node is the whole library's."""

    def __init__(self, library_of: Callable[[frozenset[str]], Path]) -> None:
        self._library_of = library_of
        self._hosts: dict[frozenset[str], PluginHost] = {}

    def session(
        self, op: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any] | None = None, **options: Any
    ) -> Session:
        try:
            complete = {} if op in STANDARD_OPS else OPS[op].complete_attributes(**(attributes or {}))
            groups = groups_of([OpUse(op, complete, _TYPES.get(inputs[0].dtype))])
        except (KeyError, OpError):  # which the library refuses
            groups = all_groups()
        return self._host_of(groups).session(op, inputs, attributes, **options)

    def take_error(self) -> str:
        return "".join(host.take_error() for host in self._hosts.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host_of(all_groups()), name)

    def _host_of(self, groups: frozenset[str]) -> PluginHost:
        if groups not in self._hosts:
            self._hosts[groups] = PluginHost(self._library_of(groups))
        return self._hosts[groups]
