"""Tensor-core instructions: mma.sync, ldmatrix and stmatrix, tcgen05."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import ldmatrix, mma, tcgen05
from ..barriers import ConditionWait
from ..codegen import STAY, Emitter, instruction
from ..errors import EmulatorError
from ..ir import Address, Instruction, Operand, Vector, literal
from ..machine import Cta, Fragment, Warp
from ..memory import OFFSET_MASK, RANK_SHIFT
from ..order import Access
from ..tensor_memory import TensorMemory, TensorPort
from .async_copy import SharedPort
from .memory import shared_load, shared_store
from .sync import lane_values, shared_address


def _whole_warp(warp: Warp, active: Any, text: str) -> None:
    if int(np.count_nonzero(active)) != warp.live.bit_count() or warp.exited:
        raise EmulatorError(f"{text} needs all lanes of the warp")


# -- mma.sync -------------------------------------------------------------------------------------------------------


def _mma(
    warp: Warp,
    active: Any,
    variant: mma.MmaSync,
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any,
    id_a: Any,
    scale_b: Any,
    id_b: Any,
) -> Any:
    _whole_warp(warp, active, "mma.sync")
    counters = warp.cta.launch.counters
    counters.mma_operations[f"mma.sync {variant.a_type}"] += 2 * variant.m * variant.n * variant.k
    if scale_a is None:
        return variant.execute(np.array(a), np.array(b), np.array(c))
    selectors = [(int(i[0][0]), int(i[1][0])) for i in (id_a, id_b)]
    return variant.execute(np.array(a), np.array(b), np.array(c), scale_a, selectors[0], scale_b, selectors[1])


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


@instruction("mma")
def _mma_sync(e: Emitter, item: Instruction) -> None:
    variant = mma.decode(item.opcode)
    d, a, b, c = (_items(o) for o in item.operands[:4])
    fragments = [e.bound([e.value(i, "b32") for i in part]) for part in (a, b, c)]
    scales = ["None"] * 4
    if variant.scale_vectors:
        for index in (0, 2):
            value, selector = item.operands[4 + index], item.operands[5 + index]
            scales[index] = e.value(_items(value)[0], "u32")
            scales[index + 1] = e.bound([e.value(i, "u16") for i in _items(selector)])
    arguments = ", ".join([e.name(variant), *fragments, *scales])
    e.merge_call(_mma, f"w, {e.mask}, {arguments}", list(d), "b32")


# -- ldmatrix, stmatrix ---------------------------------------------------------------------------------------------


class _GenericPort:
    """Row-wise access of a warp to shared memory through the generic proxy."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.counters = warp.cta.launch.counters

    def read(self, addresses: Any, count: int) -> Any:
        self.counters.bytes_read["shared (ldmatrix)"] += len(addresses) * count
        words = shared_load(self.warp, addresses.astype(np.uint64), 8, count // 8)
        return np.ascontiguousarray(words).view(np.uint8).reshape(len(addresses), count)

    def write(self, addresses: Any, data: Any) -> None:
        self.counters.bytes_written["shared (stmatrix)"] += data.size
        words = np.ascontiguousarray(data).view(np.uint64)
        shared_store(self.warp, addresses.astype(np.uint64), words, 8, words.shape[1])


def _matrix_options(item: Instruction) -> tuple[str, int, bool, str | None]:
    shape = next(m for m in item.opcode if m in ("m8n8", "m8n16", "m16n16", "m16n8"))
    count = next((int(m[1]) for m in item.opcode if m in ("x1", "x2", "x4")), 1)
    expansion = next((m for m in item.opcode if m in ("b4x16_p64", "b6x16_p32")), None)
    return shape, count, item.has("trans"), expansion


def _load_matrix(warp: Warp, active: Any, addresses: Any, shape: str, count: int, trans: bool, expansion: Any) -> Any:
    _whole_warp(warp, active, "ldmatrix")
    return ldmatrix.load(addresses, _GenericPort(warp).read, shape, count, trans, expansion)


def _store_matrix(warp: Warp, active: Any, addresses: Any, registers: Any, shape: str, trans: bool) -> None:
    _whole_warp(warp, active, "stmatrix")
    ldmatrix.store(addresses, np.array(registers), _GenericPort(warp).write, shape, trans)
    warp.cta.launch.activity += 1


@instruction("ldmatrix")
def _ldmatrix(e: Emitter, item: Instruction) -> None:
    shape, count, trans, expansion = _matrix_options(item)
    address = shared_address(e, item, item.operands[1])
    arguments = f"w, {e.mask}, {address}, {shape!r}, {count}, {trans}, {expansion!r}"
    e.merge_call(_load_matrix, arguments, list(_items(item.operands[0])), "b32")


@instruction("stmatrix")
def _stmatrix(e: Emitter, item: Instruction) -> None:
    shape, _, trans, _ = _matrix_options(item)
    registers = e.bound([e.value(i, "b32") for i in _items(item.operands[1])])
    address = shared_address(e, item, item.operands[0])
    e.line(f"{e.name(_store_matrix)}(w, {e.mask}, {address}, {registers}, {shape!r}, {trans})")


# -- tcgen05: allocation and transfers ------------------------------------------------------------------------------


def _memory(cta: Cta) -> TensorMemory:
    if cta.tensor_memory is None:
        cta.tensor_memory = TensorMemory(cta.cluster.agents, cta.launch.tensor_columns[cta.sm])
    memory: TensorMemory = cta.tensor_memory
    return memory


def _first(active: Any, values: Any) -> int:
    return int(values[int(np.argmax(active))])


def allocate(warp: Warp, fragment: Fragment, active: Any, target: Any, columns: Any, ctas: int) -> bool:
    """True while the warp waits for columns, or, of a pair, for the other CTA's warp: the two allocate together."""
    _whole_warp(warp, active, "tcgen05.alloc")
    waited, fragment.wait = fragment.wait, None
    memory, count = _memory(warp.cta), _first(active, columns)
    if not isinstance(waited, _PairWait):
        address = memory.allocate(count)
        if address is None:
            text = f"waits for {count} columns of tensor memory; allocated: {memory.allocations}"
            fragment.wait = ConditionWait(lambda: not memory.taken.all(), text)
            return True
        lane = int(np.argmax(active))
        shared_store(warp, target[lane : lane + 1], np.array([address], np.uint32), 4, 1)
        warp.cta.launch.activity += 1
        if ctas == 2:
            peer = next(cta for cta in _pair(warp.cta, ctas) if cta is not warp.cta)
            done = len(warp.cta.pair_allocations)
            warp.cta.pair_allocations.append(count)
            if len(peer.pair_allocations) <= done:
                text = f"tcgen05.alloc.cta_group::2 waits for {peer.name}"
                fragment.wait = _PairWait(lambda: len(peer.pair_allocations) > done, text)
                return True
    return False


class _PairWait(ConditionWait):
    """For the other CTA of a pair."""


def deallocate(warp: Warp, active: Any, address: Any, columns: Any) -> None:
    _whole_warp(warp, active, "tcgen05.dealloc")
    clock = warp.clock.copy()
    for other in (w for cta in warp.cta.cluster.ctas for w in cta.warps):
        # Loads that were issued before what this warp has seen: CUTLASS's 72a does not wait for them (see load).
        if clock[other.id] >= other.loaded_at:
            clock[warp.cta.cluster.agents.of("tcgen05.ld", other.id)] = other.tensor_loads
    _memory(warp.cta).free(_first(active, address), _first(active, columns), clock)


def relinquish(warp: Warp) -> None:
    _memory(warp.cta).may_allocate = False


def load(warp: Warp, active: Any, address: Any, shape: str, count: int, pack: bool, split: int) -> Any:
    """tcgen05.ld: registers [n, 32] at once.

    The ISA asks for tcgen05.wait::ld before their use, but CUTLASS's epilogues rely on the register dependency, so a
    missing wait is not reported.
    """
    _whole_warp(warp, active, "tcgen05.ld")
    memory, where = _memory(warp.cta), _first(active, address)
    finish_stores(warp, memory.columns(where, warp.index, shape, count, pack, split))
    warp.tensor_loads += 1
    access = replace(warp.issue("tcgen05.ld", warp.tensor_loads), clock=warp.after_own_stores())
    warp.loaded_at = int(warp.clock[warp.id])
    values = memory.load(where, warp.index, shape, count, pack, split, access)
    warp.cta.launch.counters.bytes_read["tensor"] += values.nbytes
    return np.ascontiguousarray(values)


def store(
    warp: Warp, active: Any, address: Any, shape: str, count: int, unpack: bool, split: int, registers: Any
) -> None:
    """tcgen05.st: written to tensor memory only by tcgen05.wait::st, or when the warp loads what it wrote."""
    _whole_warp(warp, active, "tcgen05.st")
    where, values = _first(active, address), np.array(registers)
    warp.cta.launch.counters.bytes_written["tensor"] += 128 * len(registers)
    memory = _memory(warp.cta)
    columns = memory.columns(where, warp.index, shape, count, unpack, split)
    warp.tensor_stored += 1
    access = warp.issue("tcgen05.st", warp.tensor_stored)
    access.clock[warp.cta.cluster.agents.of("tcgen05.ld", warp.id)] = warp.tensor_loads
    finish = partial(memory.store, where, warp.index, shape, count, values, unpack, split, access)
    warp.tensor_stores.append((columns, finish))


def finish_stores(warp: Warp, columns: set[int] | None = None) -> None:
    """In their order, all that are pending, or those up to the last one that writes a column of these: a warp's loads
    and stores of the same tensor memory stay in order (PTX ISA, "tcgen05 memory consistency model", pipelined
    instructions), which CUTLASS's split-K reduction relies on."""
    stores = warp.tensor_stores
    end = len(stores)
    while columns is not None and end > 0 and stores[end - 1][0].isdisjoint(columns):
        end -= 1
    for _, finish in stores[:end]:
        finish()
    del stores[:end]


def wait_loads(warp: Warp) -> None:
    warp.see("tcgen05.ld", warp.tensor_loads)


def wait_stores(warp: Warp) -> None:
    finish_stores(warp)
    warp.see("tcgen05.st", warp.tensor_stored)


# -- tcgen05: matrix operations -------------------------------------------------------------------------------------


def _pair(cta: Cta, ctas: int) -> list[Cta]:
    """The CTAs that an operation works on, even rank first."""
    if ctas == 1:
        return [cta]
    first = cta.rank & ~1
    if first + 1 >= cta.cluster.size:
        raise EmulatorError(f"cta_group::2 in a cluster of {cta.cluster.size}")
    return cta.cluster.ctas[first : first + 2]


def _access(warp: Warp) -> Access:
    """Of the next tcgen05.mma or .cp of a warp, which come one after another."""
    warp.tensor_operations += 1
    return warp.issue("tcgen05 operations", warp.tensor_operations, warp.cta.launch.tick())


def _sides(ctas: list[Cta], path: str, access: Access) -> list[tcgen05.Cta]:
    return [tcgen05.Cta(TensorPort(_memory(c), access), SharedPort(c, path, access).read) for c in ctas]


def _queue(cta: Cta, ctas: int) -> object:
    """tcgen05.mma, .cp and .commit of one thread's CTA (pair) finish in order."""
    return ("tcgen05", id(_pair(cta, ctas)[0]))


def copy(warp: Warp, active: Any, ctas: int, address: Any, descriptor: Any, shape: str) -> None:
    cta = warp.cta
    access = _access(warp)
    for _, where, value in lane_values(active, address, descriptor):
        sides = _sides(_pair(cta, ctas), f"tcgen05.cp.{shape}", access)

        def run(where: int = where, value: int = value, sides: Any = sides) -> None:
            tcgen05.copy(shape, sides, where, value)

        cta.launch.submit(run, f"tcgen05.cp.{shape} to {where:#x} issued by {warp.name}", cta, _queue(cta, ctas))


def multiply(
    warp: Warp, active: Any, ctas: int, kind: str, d: Any, a: Any, a_in_tensor_memory: bool, b: Any, idesc: Any,
    accumulate: Any, scale_vectors: int, scale_a: Any, scale_b: Any, disabled: Any, scale_d: int,
) -> None:  # fmt: skip
    cta = warp.cta
    access = _access(warp)
    for lane, d_address, a_value, b_value, bits in lane_values(active, d, a, b, idesc):
        descriptor = tcgen05.InstructionDescriptor.decode(bits, kind)
        sides = _sides(_pair(cta, ctas), "tcgen05.mma", access)
        options: dict[str, Any] = {
            "accumulate": bool(accumulate[lane]),
            "a_in_tensor_memory": a_in_tensor_memory,
            "scale_input_d": scale_d,
            "disabled_lanes": [int(v[lane]) for v in disabled],
        }
        if scale_vectors:
            options |= {
                "scale_vectors": scale_vectors,
                "a_scale_address": int(scale_a[lane]),
                "b_scale_address": int(scale_b[lane]),
            }

        def run(
            descriptor: Any = descriptor, sides: Any = sides, d: int = d_address, a: int = a_value, b: int = b_value,
            options: Any = options,
        ) -> None:  # fmt: skip
            tcgen05.mma(descriptor, sides, d, a, b, **options)

        operations = 2 * descriptor.m * descriptor.n * descriptor.k
        cta.launch.counters.mma_operations[f"tcgen05 {kind}"] += operations
        text = f"tcgen05.mma.kind::{kind} to {d_address:#x} issued by {warp.name}"
        cta.launch.submit(run, text, cta, _queue(cta, ctas))


def commit(warp: Warp, active: Any, ctas: int, barrier: Any, mask: Any) -> None:
    cta = warp.cta
    clock = warp.hand_over()
    clock[cta.cluster.agents.of("tcgen05 operations", warp.id)] = warp.tensor_operations
    for lane, address in lane_values(active, barrier):
        if mask is None:
            arrivals = [warp.mbarrier(address, by_async=True)]
        else:
            ranks = [r for r in range(cta.cluster.size) if int(mask[lane]) >> r & 1]
            arrivals = [warp.mbarrier(r << RANK_SHIFT | address & OFFSET_MASK, True) for r in ranks]

        def run(arrivals: Any = arrivals) -> None:
            for arrival in arrivals:
                arrival.publish(clock)
                arrival.arrive(1, None)

        cta.launch.submit(run, f"tcgen05.commit issued by {warp.name}", cta, _queue(cta, ctas))


def _ctas(item: Instruction) -> int:
    return 2 if item.has("cta_group::2") else 1


@instruction("tcgen05")
def _tcgen05(e: Emitter, item: Instruction) -> None:
    handlers = {
        "alloc": _emit_alloc, "dealloc": _emit_dealloc, "relinquish_alloc_permit": _emit_relinquish, "ld": _emit_ld,
        "st": _emit_st, "wait::ld": _emit_wait, "wait::st": _emit_wait, "cp": _emit_cp, "mma": _emit_mma,
        "commit": _emit_commit, "fence::before_thread_sync": _emit_fence, "fence::after_thread_sync": _emit_fence,
    }  # fmt: skip
    handler = handlers.get(item.opcode[1])
    if handler is None:
        raise e.fail()
    handler(e, item)


def _emit_fence(e: Emitter, item: Instruction) -> None:
    """Orders tcgen05 operations around thread synchronisation, which is sequentially consistent here."""


def _emit_alloc(e: Emitter, item: Instruction) -> None:
    target, columns = shared_address(e, item, item.operands[0]), e.value(item.operands[1], "u32")
    e.line(f"if {e.name(allocate)}(w, f, {e.mask}, {target}, {columns}, {_ctas(item)}): return {STAY}")


def _emit_dealloc(e: Emitter, item: Instruction) -> None:
    address, columns = (e.value(o, "u32") for o in item.operands)
    e.line(f"{e.name(deallocate)}(w, {e.mask}, {address}, {columns})")


def _emit_relinquish(e: Emitter, item: Instruction) -> None:
    e.line(f"{e.name(relinquish)}(w)")


def _transfer(item: Instruction) -> tuple[str, int]:
    return item.opcode[4], int(next(m for m in item.opcode if m[0] == "x" and m[1:].isdigit())[1:])


def _emit_ld(e: Emitter, item: Instruction) -> None:
    if item.has("red"):
        raise e.fail()
    shape, count = _transfer(item)
    split = literal(item.operands[2]) if len(item.operands) > 2 else 0
    arguments = f"{e.address(item.operands[1])}, {shape!r}, {count}, {item.has('pack::16b')}, {split}"
    e.merge_call(load, f"w, {e.mask}, {arguments}", list(_items(item.operands[0])), "b32")


def _emit_st(e: Emitter, item: Instruction) -> None:
    shape, count = _transfer(item)
    registers = e.bound([e.value(i, "b32") for i in _items(item.operands[-1])])
    split = literal(item.operands[1]) if len(item.operands) > 2 else 0
    arguments = f"{e.address(item.operands[0])}, {shape!r}, {count}, {item.has('unpack::16b')}, {split}, {registers}"
    e.line(f"{e.name(store)}(w, {e.mask}, {arguments})")


def _emit_wait(e: Emitter, item: Instruction) -> None:
    e.line(f"{e.name(wait_loads if item.opcode[1] == 'wait::ld' else wait_stores)}(w)")


def _emit_cp(e: Emitter, item: Instruction) -> None:
    shape = ".".join(item.opcode[3:])
    address, descriptor = e.address(item.operands[0]), e.value(item.operands[1], "u64")
    e.line(f"{e.name(copy)}(w, {e.mask}, {_ctas(item)}, {address}, {descriptor}, {shape!r})")


def _emit_mma(e: Emitter, item: Instruction) -> None:
    kind = next(m for m in item.opcode if m.startswith("kind::"))[6:]
    if item.has("ws", "sp", "ashift"):
        raise e.fail()
    d, a, b, idesc, *rest = item.operands
    in_tensor_memory = isinstance(a, Address)
    a_text = e.address(a) if in_tensor_memory else e.value(a, "u64")
    scale_vectors, scales = 0, ["None", "None"]
    if item.has("block_scale"):
        scale_vectors = tcgen05.scale_vectors(kind, item.opcode)
        scales = [e.address(rest[0]), e.address(rest[1])]
        rest = rest[2:]
    disabled = "()"
    if rest and isinstance(rest[0], Vector):
        disabled = e.bound([e.value(i, "u32") for i in rest[0].items])
        rest = rest[1:]
    accumulate = e.value(rest[0], "pred")
    scale_d = literal(rest[1]) if len(rest) > 1 else 0
    e.line(
        f"{e.name(multiply)}(w, {e.mask}, {_ctas(item)}, {kind!r}, {e.address(d)}, {a_text}, {in_tensor_memory}, "
        f"{e.value(b, 'u64')}, {e.value(idesc, 'u32')}, {accumulate}, {scale_vectors}, {scales[0]}, {scales[1]}, "
        f"{disabled}, {scale_d})"
    )


def _emit_commit(e: Emitter, item: Instruction) -> None:
    barrier = shared_address(e, item, item.operands[0])
    mask = e.value(item.operands[1], "u16") if item.has("multicast::cluster") else "None"
    e.line(f"{e.name(commit)}(w, {e.mask}, {_ctas(item)}, {barrier}, {mask})")
