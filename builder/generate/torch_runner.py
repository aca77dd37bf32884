"""A decoder in Torch: on this machine's GPU with plugins through the plugin host, on a CPU with their references.

For GPUs that an engine was not built for, and machines without TensorRT. Steps of up to 512 tokens run as CUDA graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from trt_nvfp4.common.cache_names import is_state
from trt_nvfp4.plugins.compile.library import Progress, build_library
from trt_nvfp4.plugins.host import PluginHost

from ..errors import UnavailableError
from ..model.decoder_contract import HIDDEN, IDS, LOGIT_TOKENS, LOGITS, NEW_LENGTH, PAST_LENGTH, PREVIOUS_HIDDEN
from ..model.onnx_file import read
from ..targets import arch_of
from ..tensorrt.kernels import kernels_of
from .caches import cache_shapes, cache_types, logit_rows, padded_step, row_axis
from .onnx_runner import checked_decoder
from .runner import Runner
from .torch_graph.graph import Graph
from .torch_graph.plugins import HostedPlugins, Plugins, ReferencePlugins
from .torch_graph.program import Program
from .torch_logits import TorchLogits, packed, to_host

_CACHE_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
#: In int64 elements: TensorRT's, which kernels may count on.
_ALIGNMENT = 32
#: Longer steps, or of more tokens in all, are computed as they come: the GPU has enough to do meanwhile.
_LONGEST_RECORDED, _MOST_RECORDED = 512, 8192


def has_gpu() -> bool:
    """Whether Torch sees an NVIDIA GPU."""
    return torch.cuda.is_available() and torch.version.cuda is not None


class _Inputs:
    """The integers of a step, at addresses that stay. They go to the device in one copy."""

    def __init__(self, batch: int, tokens: int, device: torch.device) -> None:
        self.batch = batch
        ends = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in (batch * tokens, batch, batch)])
        host = torch.zeros(int(ends[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, host.to(device)
        #: Once the device has read `_host`.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def parts(of: Any) -> Any:
            return of[: batch * tokens].reshape(batch, tokens), of[ends[0] :][:batch], of[ends[1] :][:batch]

        self._ids, self._past, self._new = parts(host.numpy())
        #: On the device.
        self.tensors = dict(zip((IDS, PAST_LENGTH, NEW_LENGTH), parts(self._device), strict=True))

    def put(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> None:
        """`ids` [batch, tokens or fewer], `past` [batch], `new` [batch]."""
        if self._copied is not None:
            self._copied.synchronize()
        self._ids[:, : ids.shape[1]], self._ids[:, ids.shape[1] :] = ids, 0
        self._past[:], self._new[:] = past, new
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()


class _RecordedStep:
    """Steps of one length in a program of their own: as a CUDA graph from the second step of a batch on. The first
    chooses kernels, which cannot be recorded."""

    def __init__(self, program: Program, inputs: _Inputs, pool: Any) -> None:
        """`pool`: the memory of a graph's temporaries, which graphs may share that run one behind the other."""
        self.program, self.inputs, self._pool = program, inputs, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[Tensor] = []
        self._runs = 0

    def run(self, run: Callable[[Program, _Inputs], list[Tensor]]) -> list[Tensor]:
        """The outputs of one step; `run` computes one."""
        self._runs += 1
        on_gpu = self.inputs.tensors[IDS].is_cuda
        if self._graph is None and self._runs == 2 and on_gpu and not self.program.waits:
            self._graph = torch.cuda.CUDAGraph()
            # NCCL's own thread asks for events meanwhile.
            mode = "thread_local" if distributed.is_initialized() else "global"
            with torch.cuda.graph(self._graph, self._pool, capture_error_mode=mode):
                self._outputs = run(self.program, self.inputs)
        if self._graph is None:
            return run(self.program, self.inputs)
        self._graph.replay()
        return self._outputs


class TorchRunner:
    """Caches are allocated once per batch and updated in place. Steps run as CUDA graphs, one for each of some lengths,
    to which shorter ones are padded, but for the longest."""

    def __init__(self, model: Path, device: str | None = None, progress: Progress | None = None) -> None:
        """`model` is an exported or rewritten ONNX file; `device` "cuda" or "cpu" (default: the GPU, if there is one).

        `progress` sees the plugin library being compiled for this GPU, at most once. Raises BuilderError: model for no
        decoder with caches, or one with operators that Torch does not have here; ToolchainError without a compiler.
        """
        self._device = torch.device(device or ("cuda" if has_gpu() else "cpu"))
        on_gpu = self._device.type == "cuda"
        if on_gpu and not has_gpu():
            raise UnavailableError("torch sees no NVIDIA GPU here; use --runner onnxruntime")
        where = torch.cuda.get_device_name(self._device) if on_gpu else "CPU"
        self.name = f"{model} (torch, {where})"
        self.decoder = checked_decoder(read(model), model)
        self.longest_step = self.decoder.capacity
        self._hidden_type = _CACHE_TYPES[self.decoder.cache_dtype]
        graph = Graph(model, self._device)
        self._program = partial(Program, graph, plugins_of(graph, on_gpu, progress), self.decoder.caches)
        self._prefill = self._program()
        self._batch = 0
        self._caches: dict[str, Tensor] = {}
        #: Where a row by itself is copied to, from the first such step on, and which row.
        self._caches_of_one: dict[str, Tensor] = {}
        self._row = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._saved: dict[str, Tensor] = {}
        #: The last step's, or none.
        self._hidden: list[Tensor] = []
        #: Those of all tokens by position, for heads that read them: [batch, capacity, hidden_size].
        self._kept = torch.empty(0)
        #: By batch and length: steps, and first steps of drafts. `_behind` takes the tokens of a draft.
        self._recorded: dict[tuple[int, int], _RecordedStep] = {}
        self._drafts: dict[tuple[int, int], _RecordedStep] = {}
        self._behind: _RecordedStep | None = None
        #: What was drafted last, at the end of [batch, LOGIT_TOKENS], and what recorded drafts read.
        self._drafted, self._read = torch.empty(0), torch.empty(0)
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        # A graph keeps its outputs: the logits of all tokens would take gigabytes.
        self._longest_recorded = _LONGEST_RECORDED if on_gpu and not self.decoder.all_logits else LOGIT_TOKENS

    def start(self, batch: int) -> None:
        if batch == self._batch:
            for each in self._by_row():
                each.zero_()
            return
        self._forget()
        self._batch = batch
        width = 0 if self.decoder.takes_hidden else self.decoder.hidden_size
        self._kept = torch.zeros(batch, self.decoder.capacity, width, dtype=self._hidden_type, device=self._device)
        self._caches = self._empty(batch)

    def _empty(self, batch: int) -> dict[str, Tensor]:
        types = cache_types(self.decoder)
        return {
            name: torch.zeros(shape, dtype=_CACHE_TYPES[types[name]], device=self._device)
            for name, shape in cache_shapes(self.decoder, batch).items()
        }

    @torch.inference_mode()
    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> TorchLogits:
        recorded, inputs = self._placed(self._recorded, ids, past, new)
        if previous is not None:
            inputs.tensors[PREVIOUS_HIDDEN][:, : ids.shape[1]] = torch.from_numpy(previous)
        if recorded is None:
            likeliest, (logits, *self._hidden) = None, self._run(self._prefill, inputs)
        elif inputs.tensors[IDS].shape[1] > LOGIT_TOKENS:
            likeliest, (logits, *self._hidden) = None, recorded.run(self._run)
        else:
            likeliest, logits, *self._hidden = recorded.run(self._run_greedy)
        if logits.shape[1] == 1:
            return TorchLogits(logits[:, 0], likeliest=likeliest)
        return TorchLogits.of_tokens(logits, logit_rows(self.decoder, logits.shape[1], new, count), likeliest)

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> TorchLogits:
        if self._batch > 1 and not self._caches_of_one:
            self._caches_of_one = self._empty(1)
        self._row.fill_(row)
        return self.step(ids, past, new, count)

    def drafts_for(self, model: Runner) -> bool:
        return not self.decoder.takes_hidden or (isinstance(model, TorchRunner) and model._device == self._device)

    @torch.inference_mode()
    def draft(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int, model: Runner) -> np.ndarray:
        if isinstance(model, TorchRunner) and self._read is not model._kept:
            self._forget_drafts()
            self._read = model._kept
        if self._behind is None:
            self._behind = _RecordedStep(self._program(), self._inputs(self._batch, 1), self._pool)
            self._behind.inputs.tensors[NEW_LENGTH].fill_(1)
            self._drafted = torch.zeros(self._batch, LOGIT_TOKENS, dtype=torch.int64, device=self._device)
        first, inputs = self._placed(self._drafts, ids, past, new)
        if first is None:
            self._run_first(self._prefill, inputs)
        else:
            first.run(self._run_first)
        for _ in range(count - 1):
            self._behind.run(self._run_draft)
        return to_host(self._drafted)[:, -count:]

    def hidden(self) -> np.ndarray:
        found: np.ndarray = self._hidden[0].float().cpu().numpy()
        return found

    def save_states(self) -> None:
        self._saved = {name: cache.clone() for name, cache in self._caches.items() if is_state(name)}

    def restore_states(self, rows: Sequence[int]) -> None:
        for name, saved in self._saved.items():
            self._caches[name][list(rows)] = saved[list(rows)]

    def clear_row(self, row: int) -> None:
        for each in self._by_row():
            each[row].zero_()

    def copy_row(self, source: int, target: int) -> None:
        for each in self._by_row():
            each[target].copy_(each[source])

    def _by_row(self) -> Iterator[Tensor]:
        """All that is kept of sequences, their axis in front."""
        yield self._kept
        for name, cache in self._caches.items():
            yield cache.movedim(row_axis(name), 0)

    def close(self) -> None:
        self._forget()
        self._prefill.close()

    def _inputs(self, batch: int, tokens: int) -> _Inputs:
        found = _Inputs(batch, tokens, self._device)
        if self.decoder.takes_hidden:
            shape = (batch, tokens, self.decoder.hidden_size)
            found.tensors[PREVIOUS_HIDDEN] = torch.zeros(shape, dtype=self._hidden_type, device=self._device)
        return found

    def _length(self, batch: int, tokens: int, longest_past: int) -> tuple[int, bool]:
        """The length that a step is padded to, so that few are recorded, and whether it is: a power of two or, behind
        the short ones, three quarters of one. The longest are computed as they come."""
        if tokens <= LOGIT_TOKENS:
            return padded_step(tokens, longest_past, self.decoder.capacity), True
        power = 1 << (tokens - 1).bit_length()
        padded = power * 3 // 4 if tokens <= power * 3 // 4 else power
        is_recorded = padded <= self._longest_recorded and batch * padded <= _MOST_RECORDED
        if not is_recorded or longest_past + padded > self.decoder.capacity:
            return tokens, False
        return padded, True

    def _placed(
        self, steps: dict[tuple[int, int], _RecordedStep], ids: np.ndarray, past: np.ndarray, new: np.ndarray
    ) -> tuple[_RecordedStep | None, _Inputs]:
        """The one of `steps` that is recorded for these inputs, if any is, and the inputs on the device."""
        tokens, is_recorded = self._length(len(ids), ids.shape[1], int(past.max()))
        key = len(ids), tokens
        if is_recorded and key not in steps:
            steps[key] = _RecordedStep(self._program(), self._inputs(*key), self._pool)
        step = steps[key] if is_recorded else None
        inputs = self._inputs(*key) if step is None else step.inputs
        inputs.put(ids, past, new)
        return step, inputs

    def _run_first(self, program: Program, inputs: _Inputs) -> list[Tensor]:
        """The first step of a draft."""
        if self.decoder.takes_hidden:
            rows, at = self._places(inputs)
            # Padding may lie behind the model's caches.
            inputs.tensors[PREVIOUS_HIDDEN].copy_(self._read[rows, at.clamp(max=self._read.shape[1] - 1)])
        return self._run_draft(program, inputs)

    def _run_draft(self, program: Program, inputs: _Inputs) -> list[Tensor]:
        """One step of a draft, which leaves the next one's inputs."""
        assert self._behind is not None
        logits, *hidden = self._run(program, inputs)
        given, following = inputs.tensors, self._behind.inputs.tensors
        last = torch.arange(self._batch, device=self._device), given[NEW_LENGTH] - 1
        torch.argmax(logits[last] if self.decoder.all_logits else logits[:, -1], -1, True, out=following[IDS])
        torch.add(given[PAST_LENGTH], given[NEW_LENGTH], out=following[PAST_LENGTH])
        if self.decoder.takes_hidden:
            following[PREVIOUS_HIDDEN].copy_(hidden[0][last][:, None])
        self._drafted.copy_(torch.cat((self._drafted[:, 1:], following[IDS]), 1))
        return []

    def _run_greedy(self, program: Program, inputs: _Inputs) -> list[Tensor]:
        """The likeliest token of each row of logits, before what `_run` gives."""
        found = self._run(program, inputs)
        return [packed(found[0].flatten(0, 1), 1), *found]

    def _run(self, program: Program, inputs: _Inputs) -> list[Tensor]:
        """Logits and, where the decoder gives them out, hidden states."""
        is_one = inputs.batch < self._batch
        caches = self._caches_of_one if is_one else self._caches
        if is_one:
            for name, cache in self._caches.items():
                torch.index_select(cache, row_axis(name), self._row, out=caches[name])
        outputs = program.run({**inputs.tensors, **caches})
        for cache, present in zip(caches.values(), (outputs[name] for name in self.decoder.presents), strict=True):
            # Where an operator has no way of updating in place.
            if present.data_ptr() != cache.data_ptr():
                cache.copy_(present)
        if is_one:
            for name, cache in self._caches.items():
                cache.index_copy_(row_axis(name), self._row, caches[name])
        if self._kept.numel():
            self._kept[self._places(inputs)] = outputs[HIDDEN]
        return [outputs[name] for name in (LOGITS, HIDDEN)[: 2 if self.decoder.hidden_size else 1]]

    def _places(self, inputs: _Inputs) -> tuple[Tensor, Tensor]:
        """Rows [batch, 1] and positions [batch, tokens] of a step's tokens."""
        rows, tokens = (torch.arange(size, device=self._device) for size in inputs.tensors[IDS].shape)
        rows = self._row if inputs.batch < self._batch else rows
        return rows[:, None], inputs.tensors[PAST_LENGTH][:, None] + tokens

    def _forget_drafts(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for step in (*self._drafts.values(), *filter(None, [self._behind])):
            step.program.close()
        self._drafts, self._behind = {}, None
        self._pool = torch.cuda.graph_pool_handle() if self._pool is not None else None  # no graph, no pool

    def _forget(self) -> None:
        self._forget_drafts()
        for step in self._recorded.values():
            step.program.close()
        self._caches, self._caches_of_one, self._saved, self._recorded, self._batch = {}, {}, {}, {}, 0


def plugins_of(graph: Graph, on_gpu: bool, progress: Progress | None) -> Callable[[], Plugins]:
    """The factory of operators of plugin nodes; a library is compiled only where the graph has any."""
    if not on_gpu or not graph.plugin_nodes:
        return ReferencePlugins
    arch = arch_of(torch.cuda.get_device_capability(graph.device))
    library = build_library(arch, groups=kernels_of(read(graph.path)), progress=progress)
    return partial(HostedPlugins, PluginHost(library))
