"""Barriers, mbarriers, fences."""

from typing import Any

import numpy as np

from ..barriers import BarrierWait, ClusterWait, MBarrier, MBarrierWait, NamedBarrier, Yielded
from ..codegen import STAY, Emitter, instruction
from ..errors import EmulatorError
from ..ir import Address, Instruction, Operand, Sink
from ..machine import Fragment, Warp
from ..memory import OFFSET_MASK, SHARED_WINDOW
from .warp import emit_converge

_SHARED = ("shared", "shared::cta", "shared::cluster")


def shared_address(e: Emitter, item: Instruction, operand: Operand) -> str:
    """Lane addresses in the shared window, from a shared or a generic address operand."""
    text = e.address(operand)
    if item.has(*_SHARED):
        return text
    return f"({text} & {e.name(np.uint64(SHARED_WINDOW - 1))})"


def lane_values(active: Any, *arrays: Any) -> list[tuple[int, ...]]:
    """(lane, values...) of the active lanes."""
    lanes = np.flatnonzero(active).tolist()
    columns = [a[active].tolist() for a in arrays]
    return list(zip(lanes, *columns, strict=True))


# -- named barriers -------------------------------------------------------------------------------------------------


def _arrive(warp: Warp, active: Any, barrier: NamedBarrier, count: int | None) -> None:
    if count is not None:
        if count % 32 or not 0 < count <= 1024:
            raise EmulatorError(f"{barrier.name}: thread count {count} is no multiple of 32")
        if barrier.expected not in (None, count):
            raise EmulatorError(f"{barrier.name}: threads disagree on the count, {barrier.expected} and {count}")
        barrier.expected = count
    lanes = int(np.count_nonzero(active))
    if lanes == warp.live.bit_count():
        lanes = 32 if count is not None else lanes
    barrier.arrived += lanes
    barrier.waiting.append(f"warp {warp.index}")
    warp.release(barrier.clock)
    warp.cta.launch.activity += 1


def _barrier(warp: Warp, number: int) -> NamedBarrier:
    if not 0 <= number < 16:
        raise EmulatorError(f"barrier {number} does not exist: there are 16")
    return warp.cta.barriers[number]


def bar_sync(warp: Warp, fragment: Fragment, active: Any, number: Any, count: Any, vote: Any) -> bool:
    """True while the fragment has to wait. The first call arrives; the next one comes when the barrier has opened."""
    if fragment.wait is not None:
        waited = fragment.wait
        assert isinstance(waited, BarrierWait)
        warp.acquire(waited.barrier.passed_clock)
        fragment.wait = None
        return False
    lane = int(np.argmax(active))
    threads = int(count[lane]) if count is not None else None
    barrier = _barrier(warp, int(number[lane]))
    if vote is not None:
        barrier.votes.append(vote[active])
    generation = barrier.generation
    _arrive(warp, active, barrier, threads)
    warp.cta.launch.counters.barrier_waits["bar"] += 1
    warp.cta.complete_barrier(barrier)
    fragment.state = barrier
    wait = BarrierWait(warp.cta, barrier, generation, threads is None)
    if barrier.generation > generation and not warp.cta.launch.disorder.holds(wait):
        warp.acquire(barrier.passed_clock)
        return False
    fragment.wait = wait
    return True


def bar_arrive(warp: Warp, active: Any, number: Any, count: Any) -> None:
    lane = int(np.argmax(active))
    barrier = _barrier(warp, int(number[lane]))
    _arrive(warp, active, barrier, int(count[lane]))
    warp.cta.complete_barrier(barrier)


def _vote_result(fragment: Fragment, mode: str) -> Any:
    votes = fragment.state.result
    fragment.state = None
    if mode == "popc":
        return np.full(32, int(votes.sum()), np.uint32)
    return np.full(32, bool(votes.all() if mode == "and" else votes.any()))


def cluster_arrive(warp: Warp, active: Any) -> None:
    barrier = warp.cta.cluster.barrier
    warp.cluster_generation = barrier.generation
    barrier.arrived += int(np.count_nonzero(active))
    warp.release(barrier.clock)
    warp.cta.launch.activity += 1
    barrier.complete()


def cluster_wait(warp: Warp, fragment: Fragment) -> bool:
    barrier = warp.cta.cluster.barrier
    if fragment.wait is None:
        if warp.cluster_generation < 0:
            raise EmulatorError("barrier.cluster.wait without arrive")
        fragment.wait = ClusterWait(barrier, warp.cluster_generation)
        warp.cta.launch.counters.barrier_waits["cluster"] += 1
        if not fragment.wait.ready():
            return True
    fragment.wait = None
    warp.cluster_generation = -1
    warp.acquire(barrier.passed_clock)
    return False


@instruction("bar", "barrier")
def _bar(e: Emitter, item: Instruction) -> None:
    if item.has("warp"):
        emit_converge(e, item, item.operands[0])
        return
    if item.has("cluster"):
        if item.has("arrive"):
            e.line(f"{e.name(cluster_arrive)}(w, {e.mask})")
        else:
            e.line(f"if {e.name(cluster_wait)}(w, f): return {STAY}")
        return
    operands = item.operands
    if item.has("arrive"):
        number, count = (e.value(o, "u32") for o in operands)
        e.line(f"{e.name(bar_arrive)}(w, {e.mask}, {number}, {count})")
    elif item.has("sync"):
        number = e.value(operands[0], "u32")
        count = e.value(operands[1], "u32") if len(operands) > 1 else "None"
        e.line(f"if {e.name(bar_sync)}(w, f, {e.mask}, {number}, {count}, None): return {STAY}")
    elif item.has("red"):
        mode = next(m for m in ("popc", "and", "or") if item.has(m))
        number, vote = e.value(operands[1], "u32"), e.value(operands[-1], "pred")
        count = e.value(operands[2], "u32") if len(operands) > 3 else "None"
        e.line(f"if {e.name(bar_sync)}(w, f, {e.mask}, {number}, {count}, {vote}): return {STAY}")
        e.assign(operands[0], f"{e.name(_vote_result)}(f, {mode!r})", "u32" if mode == "popc" else "pred")
    else:
        raise e.fail()


# -- mbarriers ------------------------------------------------------------------------------------------------------


def mbarrier_init(warp: Warp, active: Any, addresses: Any, counts: Any) -> None:
    cta = warp.cta
    for _, address, count in lane_values(active, addresses, counts):
        if address % 8:
            raise EmulatorError(f"misaligned mbarrier at {address:#x}")
        target = cta.peer(address)
        offset = address & OFFSET_MASK
        target.shared.slice(address, 8, "mbarrier.init")
        name = f"mbarrier at {address:#x} of {target.name}"
        if offset in target.mbarriers:
            raise EmulatorError(f"mbarrier.init of {name}, which is one already: mbarrier.inval comes first")
        barrier = MBarrier(count, target, offset, name, (warp.id, int(warp.clock[warp.id])))
        target.mbarriers[offset] = barrier
        warp.unfenced_mbarriers.append(barrier)
        target.shared.mark_written(offset, 8)
    cta.launch.activity += 1


def mbarrier_invalidate(warp: Warp, active: Any, addresses: Any) -> None:
    for _, address in lane_values(active, addresses):
        warp.mbarrier(address)
        del warp.cta.peer(address).mbarriers[address & OFFSET_MASK]


def mbarrier_arrive(warp: Warp, active: Any, addresses: Any, counts: Any, transactions: Any, drop: bool) -> Any:
    """arrive, arrive_drop, and their .expect_tx forms; returns phase tokens."""
    tokens = np.zeros(32, np.uint64)
    for lane, address, count in lane_values(active, addresses, counts):
        barrier = warp.mbarrier(address)
        if transactions is not None:
            # the transaction count rises before the arrival, so the phase cannot complete in between
            barrier.transactions += int(transactions[lane])
        tokens[lane] = (barrier.drop if drop else barrier.arrive)(count, warp)
    warp.cta.launch.activity += 1
    return tokens


def mbarrier_transact(warp: Warp, active: Any, addresses: Any, amounts: Any, sign: int) -> None:
    for _, address, amount in lane_values(active, addresses, amounts):
        barrier = warp.mbarrier(address)
        warp.release(barrier.clock)
        barrier.transact(sign * amount)
    warp.cta.launch.activity += 1


def mbarrier_wait(
    warp: Warp, fragment: Fragment, active: Any, addresses: Any, values: Any, parity: bool, blocking: bool
) -> Any:
    """The predicate of test_wait or try_wait, or None while try_wait suspends."""
    unique = sorted(set(zip(addresses[active].tolist(), values[active].tolist(), strict=True)))
    waits = [(warp.mbarrier(address), int(value), parity) for address, value in unique]
    if parity and any(value > 1 for _, value, _ in waits):
        raise EmulatorError(f"parity {max(value for _, value, _ in waits)} of a phase: it is 0 or 1")
    done = [b.passed(value) if parity else b.phase > value for b, value, _ in waits]
    launch = warp.cta.launch
    previous, fragment.wait = fragment.wait, None
    # What this warp has seen to be over stays so.
    seen = all(warp.seen_phases.get(barrier) == barrier.phase for barrier, _, _ in waits)
    if previous is None and not (seen and all(done)) and launch.disorder.peek_fails(fragment, all(done)):
        return np.zeros(32, bool)
    if all(done):
        for barrier, _, _ in waits:
            warp.acquire(barrier.passed_clock)
            warp.seen_phases[barrier] = barrier.phase
        return np.ones(32, bool)
    expired = isinstance(previous, (MBarrierWait, Yielded))
    if not expired:
        launch.counters.barrier_waits["mbarrier"] += 1
        fragment.wait = MBarrierWait(waits) if blocking else Yielded(f"polls {MBarrierWait(waits).describe()}")
        return None
    if len(waits) == 1:
        return np.zeros(32, bool)
    passed = dict(zip(unique, done, strict=True))
    out = np.zeros(32, bool)
    for lane, address, value in lane_values(active, addresses, values):
        out[lane] = passed[address, value]
    return out


@instruction("mbarrier")
def _mbarrier(e: Emitter, item: Instruction) -> None:
    kind = item.opcode[1]
    operands = list(item.operands)
    one = e.name(np.ones(32, np.uint32))
    if kind == "init":
        count = e.value(operands[1], "u32")
        e.line(f"{e.name(mbarrier_init)}(w, {e.mask}, {shared_address(e, item, operands[0])}, {count})")
    elif kind == "inval":
        e.line(f"{e.name(mbarrier_invalidate)}(w, {e.mask}, {shared_address(e, item, operands[0])})")
    elif kind in ("arrive", "arrive_drop"):
        if item.has("noComplete"):
            raise e.fail()
        destination: Operand = Sink()
        if not isinstance(operands[0], Address):
            destination = operands.pop(0)
        counts, transactions = one, "None"
        if item.has("expect_tx"):
            transactions = e.value(operands[1], "u32")
        elif len(operands) > 1:
            counts = e.value(operands[1], "u32")
        address = shared_address(e, item, operands[0])
        call = f"{e.name(mbarrier_arrive)}(w, {e.mask}, {address}, {counts}, {transactions}, {kind == 'arrive_drop'})"
        if isinstance(destination, Sink):
            e.line(call)
        else:
            e.assign(destination, call, "u64")
    elif kind in ("expect_tx", "complete_tx"):
        sign = 1 if kind == "expect_tx" else -1
        amount = e.value(operands[1], "u32")
        address = shared_address(e, item, operands[0])
        e.line(f"{e.name(mbarrier_transact)}(w, {e.mask}, {address}, {amount}, {sign})")
    elif kind in ("test_wait", "try_wait"):
        parity = item.has("parity")
        value = e.value(operands[2], "u32" if parity else "u64")
        address = shared_address(e, item, operands[1])
        arguments = f"w, f, {e.mask}, {address}, {value}, {parity}, {kind == 'try_wait'}"
        name = e.temporary()
        e.line(f"{name} = {e.name(mbarrier_wait)}({arguments})")
        e.line(f"if {name} is None: return {STAY}")
        e.assign(operands[0], name, "pred")
    else:
        raise e.fail()


# -- giving way ----------------------------------------------------------------------------------------------------


def give_way(fragment: Fragment, reason: str) -> bool:
    """Whether the fragment lets the others run before it goes on: once each time that it comes here."""
    if fragment.wait is None:
        fragment.wait = Yielded(reason)
        return True
    fragment.wait = None
    return False


@instruction("nanosleep")
def _nanosleep(e: Emitter, item: Instruction) -> None:
    e.line(f"if {e.name(give_way)}(f, 'sleeps'): return {STAY}")
