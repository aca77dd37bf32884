"""The `cp` family: bulk copies, tensor copies, their reductions and groups; st.async and red.async."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import tensor_map
from ..barriers import ConditionWait
from ..codegen import STAY, Emitter, instruction, view_dtype
from ..errors import EmulatorError, MemoryFault
from ..ir import TYPE_BITS, Address, Instruction, Operand, Vector, literal
from ..machine import AsyncOperation, Cta, Fragment, Warp
from ..memory import OFFSET_MASK, RANK_SHIFT, wide_rows
from ..order import Access, Clock
from . import tensormap
from .memory import emit_cp_async
from .sync import lane_values, shared_address

Bytes = Any


class GlobalPort:
    """Row-wise access to global memory for copies, issued by who had seen what its clock says."""

    def __init__(self, cta: Cta, path: str, clock: Clock) -> None:
        self.launch = cta.launch
        self.waited = bool(clock[-1])
        self.memory = cta.launch.device.memory
        self.counters = cta.launch.counters
        self.path = path

    def _index(self, addresses: Any, count: int, action: str, reads: bool) -> tuple[Any, Any, Any]:
        region = self.memory.region(int(addresses[0]))
        offsets = addresses.astype(np.int64) - region.base
        if int(offsets.min()) < 0 or int(offsets.max()) + count > region.size:
            bad = int(addresses[np.argmax((offsets < 0) | (offsets + count > region.size))])
            raise MemoryFault(f"{action} of {count} bytes at {bad:#x} leaves {region.name}")
        region.touch(offsets, count)
        width, index = wide_rows(offsets, count)
        if region.stamps is not None:
            if self.launch.overlaps:
                self.launch.overlap.access_by(self.waited)
            (region.stamps.read if reads else region.stamps.write)(index.reshape(-1), width)
        return region, region.view(width), index

    def read(self, addresses: Any, count: int) -> Bytes:
        _, elements, index = self._index(addresses, count, self.path, True)
        self.counters.bytes_read[f"global ({self.path})"] += len(addresses) * count
        return elements[index].view(np.uint8)

    def write(self, addresses: Any, data: Bytes) -> None:
        region, elements, index = self._index(addresses, data.shape[1], self.path, False)
        if region.read_only:
            raise MemoryFault(f"{self.path} writes to read-only {region.name}")
        self.counters.bytes_written[f"global ({self.path})"] += data.size
        elements[index] = np.ascontiguousarray(data).view(elements.dtype)


class SharedPort:
    """Row-wise access of the async proxy to one CTA's shared memory, by addresses without the rank."""

    def __init__(self, cta: Cta, path: str, access: Access) -> None:
        self.cta, self.path, self.access = cta, path, access

    def read(self, addresses: Any, count: int) -> Bytes:
        self.cta.launch.counters.bytes_read[f"shared ({self.path})"] += len(addresses) * count
        return self.cta.shared.read_async(addresses.astype(np.int64), count, self.access, self.path)

    def write(self, addresses: Any, data: Bytes) -> None:
        if self.cta.gone:
            raise MemoryFault(f"{self.path} writes to {self.cta.shared.name}, which has exited")
        self.cta.launch.counters.bytes_written[f"shared ({self.path})"] += data.size
        self.cta.shared.write_async(addresses.astype(np.int64), data, self.access, self.path)


def destinations(warp: Warp, address: int, barrier: int, mask: int | None, pair: bool) -> list[tuple[Cta, Any]]:
    """(CTA, mbarrier) that a copy to shared memory serves.

    Multicast reaches the same offsets in every CTA of the mask; with .cta_group::2 the barrier is the one in that CTA
    of the destination's pair that has the parity of the barrier operand's CTA.
    """
    cta = warp.cta
    if mask is None:
        return [(cta.peer(address), warp.mbarrier(barrier, by_async=True))]
    found = []
    for rank in range(cta.cluster.size):
        if mask >> rank & 1:
            owner = (rank & ~1) | (barrier >> RANK_SHIFT & 1) if pair else rank
            found.append((cta.cluster.ctas[rank], warp.mbarrier(owner << RANK_SHIFT | barrier & OFFSET_MASK, True)))
    if mask >> cta.cluster.size:
        raise EmulatorError(f"multicast mask {mask:#x} names CTAs outside the cluster of {cta.cluster.size}")
    return found


def _group(warp: Warp, lane: int, operation: AsyncOperation) -> None:
    warp.bulk_open.setdefault(lane, []).append(operation)


# -- tensor copies --------------------------------------------------------------------------------------------------


def _tensor_map(warp: Warp, address: int) -> tensor_map.TensorMap:
    if address % 64:
        raise MemoryFault(f"tensor map at {address:#x} is not aligned to 64 bytes")
    return tensor_map.TensorMap.from_bytes(tensormap.visible(warp, address))


def _four_rows(box: tensor_map.TensorMap, start: list[int]) -> tuple[list[int], list[int] | None]:
    """(coordinates, rows) of .tile::gather4 and .tile::scatter4, which name a column and four rows of a matrix."""
    return (start[:2], start[1:]) if len(box.dims) == 2 and len(start) == 5 else (start, None)


def tensor_load(
    warp: Warp, active: Any, target: Any, source: Any, coordinates: Any, barriers: Any, mask: Any, pair: bool, text: str
) -> None:
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    for lane, address, map_address, barrier in lane_values(active, target, source, barriers):
        box = _tensor_map(warp, map_address)
        start = [int(c[lane]) for c in coordinates]
        ctas = destinations(warp, address, barrier, None if mask is None else int(mask[lane]), pair)
        offset = address & OFFSET_MASK
        if offset % 128:
            raise MemoryFault(f"tensor copy to shared address {address:#x}, not aligned to 128 bytes")

        def load(box: Any = box, start: Any = start, offset: int = offset) -> Any:
            first, gathered = _four_rows(box, start)
            return tensor_map.load(box, first, offset, GlobalPort(cta, "tensor copy", clock).read, gathered)

        early = load() if cta.launch.disorder.reads_at_once() else None

        def run(box: Any = box, start: Any = start, ctas: Any = ctas, load: Any = load, early: Any = early) -> None:
            gathered = _four_rows(box, start)[1]
            rows, data = load() if early is None else early
            size = box.transaction_bytes if gathered is None else 4 * box.transaction_bytes // box.counts[1]
            for peer, arrival in ctas:
                SharedPort(peer, "tensor copy", arrival.access(clock, issued)).write(rows, data)
                arrival.transact(-size)

        cta.launch.submit(run, f"{text} issued by {warp.name}", cta)


def tensor_store(
    warp: Warp, active: Any, target: Any, coordinates: Any, source: Any, reduction: str | None, text: str
) -> None:
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    submitted: dict[Any, AsyncOperation] = {}
    for lane, map_address, address in lane_values(active, target, source):
        start = [int(c[lane]) for c in coordinates]
        key = (map_address, address, *start)
        if reduction is None and key in submitted:  # CUTLASS lets a whole warp store the same box
            _group(warp, lane, submitted[key])
            continue
        box = _tensor_map(warp, map_address)
        if (address & OFFSET_MASK) % 128:
            raise MemoryFault(f"tensor copy from shared address {address:#x}, not aligned to 128 bytes")

        access = warp.bulk_access(lane, clock, issued)

        def run(box: Any = box, start: Any = start, offset: int = address & OFFSET_MASK, access: Any = access) -> None:
            port, shared = GlobalPort(cta, "tensor copy", clock), SharedPort(cta, "tensor copy", access)
            first, scattered = _four_rows(box, start)
            tensor_map.store(box, first, offset, shared.read, port.write, port.read, reduction, scattered)

        submitted[key] = cta.launch.submit(run, f"{text} issued by {warp.name}", cta)
        _group(warp, lane, submitted[key])


# -- bulk copies ----------------------------------------------------------------------------------------------------


def _check_bulk(*values: int) -> None:
    if any(v % 16 for v in values):
        raise MemoryFault(f"bulk copy operands {[hex(v) for v in values]} are no multiples of 16 bytes")


def bulk_to_shared(
    warp: Warp, active: Any, target: Any, source: Any, size: Any, barriers: Any, mask: Any, from_shared: bool, text: str
) -> None:
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    for lane, address, origin, count, barrier in lane_values(active, target, source, size, barriers):
        _check_bulk(address, origin, count)
        ctas = destinations(warp, address, barrier, None if mask is None else int(mask[lane]), False)

        def load(origin: int = origin, count: int = count, ctas: Any = ctas) -> Bytes:
            if from_shared:
                access = ctas[0][1].access(clock, issued)
                return SharedPort(cta, "bulk copy", access).read(np.array([origin & OFFSET_MASK]), count)
            return GlobalPort(cta, "bulk copy", clock).read(np.array([origin], np.uint64), count)

        early = load() if not from_shared and cta.launch.disorder.reads_at_once() else None

        def run(
            address: int = address, count: int = count, ctas: Any = ctas, load: Any = load, early: Any = early
        ) -> None:
            data = load() if early is None else early
            for peer, arrival in ctas:
                access = arrival.access(clock, issued)
                SharedPort(peer, "bulk copy", access).write(np.array([address & OFFSET_MASK]), data)
                arrival.transact(-count)

        cta.launch.submit(run, f"{text} issued by {warp.name}", cta)


def bulk_to_global(
    warp: Warp, active: Any, target: Any, source: Any, size: Any, reduction: str | None, dtype: Any, text: str
) -> None:
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    for lane, address, origin, count in lane_values(active, target, source, size):
        _check_bulk(address, origin, count)

        access = warp.bulk_access(lane, clock, issued)

        def run(address: int = address, origin: int = origin, count: int = count, access: Any = access) -> None:
            port = GlobalPort(cta, "bulk copy", clock)
            data = SharedPort(cta, "bulk copy", access).read(np.array([origin & OFFSET_MASK]), count)
            where = np.array([address], np.uint64)
            if reduction is not None:
                data = tensor_map.reduce(reduction, dtype, port.read(where, count), data)
            port.write(where, data)

        _group(warp, lane, cta.launch.submit(run, f"{text} issued by {warp.name}", cta))


def bulk_commit(warp: Warp, active: Any) -> None:
    for lane in np.flatnonzero(active).tolist():
        group = warp.bulk_open.pop(lane, [])
        for operation in group:
            operation.committed = True
        warp.bulk_groups.setdefault(lane, []).append(group)
        warp.bulk_committed[lane] = warp.bulk_committed.get(lane, 0) + 1


def bulk_wait(warp: Warp, fragment: Fragment, active: Any, pending: int) -> bool:
    """True while some group but the last `pending` of an active lane is unfinished."""
    fragment.wait = None
    groups = [g for lane in np.flatnonzero(active).tolist() for g in warp.bulk_groups.get(lane, [])[: -pending or None]]
    operations = [o for group in groups for o in group if not o.done]
    if operations:
        text = f"waits for {len(operations)} bulk operations, first: {operations[0].text}"
        fragment.wait = ConditionWait(lambda: all(o.done for o in operations), text)
        return True
    for lane in np.flatnonzero(active).tolist():
        kept = warp.bulk_groups.get(lane, [])
        warp.bulk_groups[lane] = kept[len(kept) - pending :] if pending else []
        warp.see("bulk copies", warp.bulk_committed.get(lane, 0) - len(warp.bulk_groups[lane]))
    return False


def copies_arrive(warp: Warp, active: Any, addresses: Any, increment: bool) -> None:
    """cp.async.mbarrier.arrive: an arrival once this thread's earlier cp.async copies are done."""
    copies: list[Callable[[], None]] = [run for group in [*warp.copy_groups, warp.copies] for run in group]
    warp.copies, warp.copy_groups = [], []
    arrivals = [warp.mbarrier(address) for _, address in lane_values(active, addresses)]
    for barrier in arrivals:
        barrier.pending += int(increment)

    def run() -> None:
        for copy in copies:
            copy()
        for barrier in arrivals:
            barrier.arrive(1, warp)

    warp.cta.launch.submit(run, f"cp.async.mbarrier.arrive by {warp.name}", warp.cta, queue=warp)


# -- emission -------------------------------------------------------------------------------------------------------


def _coordinates(e: Emitter, operand: Operand) -> str:
    assert isinstance(operand, Address)
    assert isinstance(operand.coordinates, Vector)
    return e.bound([e.value(c, "s32") for c in operand.coordinates.items])


def _base(e: Emitter, operand: Operand) -> str:
    assert isinstance(operand, Address)
    return e.address(Address(operand.base, operand.offset))


def _emit_tensor(e: Emitter, item: Instruction) -> None:
    if any(m.startswith("im2col") for m in item.opcode):
        raise e.fail()
    operands = item.operands
    if item.has("prefetch"):
        return
    if item.has("bulk_group"):
        reduction = "None"
        if item.opcode[1] == "reduce":
            reduction = repr(
                next(m for m in item.opcode if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
            )
        target, source = _base(e, operands[0]), e.address(operands[1])
        arguments = f"w, {e.mask}, {target}, {_coordinates(e, operands[0])}, {source}, {reduction}"
        e.line(f"{e.name(tensor_store)}({arguments}, {item.text[:80]!r})")
        return
    multicast = item.has("multicast::cluster")
    mask = e.value(operands[3], "u16") if multicast else "None"
    arguments = (
        f"w, {e.mask}, {e.address(operands[0])}, {_base(e, operands[1])}, {_coordinates(e, operands[1])}, "
        f"{e.address(operands[2])}, {mask}, {item.has('cta_group::2')}"
    )
    e.line(f"{e.name(tensor_load)}({arguments}, {item.text[:80]!r})")


def _emit_bulk(e: Emitter, item: Instruction) -> None:
    operands = item.operands
    kinds = item.opcode[item.opcode.index("bulk") + 1 :]
    if kinds[0] == "prefetch":
        return
    if kinds[0] == "commit_group":
        e.line(f"{e.name(bulk_commit)}(w, {e.mask})")
    elif kinds[0] == "wait_group":
        pending = literal(operands[0])
        e.line(f"if {e.name(bulk_wait)}(w, f, {e.mask}, {pending}): return {STAY}")
    elif kinds[0] == "tensor":
        _emit_tensor(e, item)
    else:
        target, source = e.address(operands[0]), e.address(operands[1])
        size = e.value(operands[2], "u32")
        reduction, dtype = "None", "None"
        if item.opcode[1] == "reduce":
            if item.type in ("bf16", "f16"):
                raise e.fail()
            reduction, dtype = repr(item.opcode[-2]), e.name(view_dtype(item.type))
        if kinds[0] == "global":
            arguments = f"w, {e.mask}, {target}, {source}, {size}, {reduction}, {dtype}"
            e.line(f"{e.name(bulk_to_global)}({arguments}, {item.text[:80]!r})")
            return
        if reduction != "None":
            raise e.fail()
        mask = e.value(operands[4], "u16") if item.has("multicast::cluster") else "None"
        from_shared = kinds[1].startswith("shared")
        arguments = f"w, {e.mask}, {target}, {source}, {size}, {e.address(operands[3])}, {mask}, {from_shared}"
        e.line(f"{e.name(bulk_to_shared)}({arguments}, {item.text[:80]!r})")


@instruction("cp")
def _cp(e: Emitter, item: Instruction) -> None:
    if item.has("bulk"):
        _emit_bulk(e, item)
    elif item.opcode[2] == "mbarrier":
        address = shared_address(e, item, item.operands[0])
        e.line(f"{e.name(copies_arrive)}(w, {e.mask}, {address}, {not item.has('noinc')})")
    else:
        emit_cp_async(e, item)


def store_async(warp: Warp, active: Any, target: Any, values: Any, barriers: Any, text: str) -> None:
    """st.async: each lane writes another CTA's shared memory and completes its bytes on a barrier there."""
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    for lane, address, barrier in lane_values(active, target, barriers):
        data = np.concatenate([np.ascontiguousarray(v[lane : lane + 1]).view(np.uint8) for v in values])[None, :]
        arrival = warp.mbarrier(barrier, by_async=True)

        def run(address: int = address, data: Any = data, arrival: Any = arrival) -> None:
            port = SharedPort(cta.peer(address), "st.async", arrival.access(clock, issued))
            port.write(np.array([address & OFFSET_MASK]), data)
            arrival.transact(-data.size)

        cta.launch.submit(run, f"{text} by {warp.name}", cta)


@instruction("st.async")
def _store_async(e: Emitter, item: Instruction) -> None:
    bits = TYPE_BITS[item.type]
    source = item.operands[1]
    items = source.items if isinstance(source, Vector) else (source,)
    values = e.bound([e.value(i, f"b{bits}") for i in items])
    target, barrier = e.address(item.operands[0]), e.address(item.operands[2])
    e.line(f"{e.name(store_async)}(w, {e.mask}, {target}, {values}, {barrier}, {item.text[:60]!r})")


def reduce_async(
    warp: Warp, active: Any, target: Any, values: Any, operation: str, dtype: Any, barriers: Any, text: str
) -> None:
    cta = warp.cta
    issued, clock = cta.launch.tick(), warp.hand_over()
    for lane, address, barrier in lane_values(active, target, barriers):
        data = np.ascontiguousarray(values[lane : lane + 1]).view(np.uint8)[None, :]
        arrival = warp.mbarrier(barrier, by_async=True)

        def run(address: int = address, data: Any = data, arrival: Any = arrival) -> None:
            access = arrival.access(clock, issued)
            clock[access.agent] = access.epoch  # they add up in any order
            port, where = SharedPort(cta.peer(address), "red.async", access), np.array([address & OFFSET_MASK])
            port.write(
                where,
                tensor_map.reduce(operation, dtype, port.cta.shared.data[where[:, None] + np.arange(data.size)], data),
            )
            arrival.transact(-data.size)

        cta.launch.submit(run, f"{text} by {warp.name}", cta)


@instruction("red.async")
def _reduce_async(e: Emitter, item: Instruction) -> None:
    operation = next(m for m in item.opcode if m in ("add", "min", "max", "inc", "dec", "and", "or", "xor"))
    value = e.value(item.operands[1], f"b{TYPE_BITS[item.type]}")
    target, barrier = e.address(item.operands[0]), e.address(item.operands[2])
    arguments = f"w, {e.mask}, {target}, {value}, {operation!r}, {e.name(view_dtype(item.type))}, {barrier}"
    e.line(f"{e.name(reduce_async)}({arguments}, {item.text[:60]!r})")
