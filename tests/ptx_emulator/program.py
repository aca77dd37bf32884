"""A function made ready to run: calls inlined, basic blocks, reconvergence points."""

from dataclasses import dataclass, field, replace

from .errors import PtxSyntaxError, UnknownInstructionError
from .ir import (
    Address,
    Function,
    Group,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

# Instructions on which a warp may have to wait: each starts a block, so that waiting is re-running the block.
_BLOCKING = {
    "bar",
    "barrier",
    "nanosleep",
    "shfl",
    "vote",
    "match",
    "redux",
    "elect",
    "activemask",
    "griddepcontrol",
    "setmaxnreg",
}
_BLOCKING_PREFIXES = {
    ("mbarrier", "try_wait"), ("mbarrier", "test_wait"), ("cp", "async", "bulk", "wait_group"), ("tcgen05", "alloc"),
    ("cp", "async", "wait_group"), ("cp", "async", "wait_all"), ("ld", "acquire"), ("ld", "relaxed"),
    ("wgmma", "wait_group"),
}  # fmt: skip
EXIT = -1


@dataclass
class Block:
    """Straight-line code. `successors` are block numbers; EXIT ends the thread.

    The terminator is the last instruction when it branches; a guarded branch falls through to `successors[-1]`.
    """

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    reconvergence: int = EXIT


@dataclass
class Program:
    name: str
    registers: list[Register]
    blocks: list[Block]
    shared: dict[str, int]
    static_shared: int
    local: dict[str, int]
    local_size: int
    params: dict[str, int]
    param_sizes: list[int]
    param_bytes: int
    directives: dict[str, tuple[int, ...]]


def build(module: Module, name: str) -> Program:
    """The program of entry `name`; `module` may be shared among entries."""
    function = module.functions[name]
    flat = _Inliner(module, function)
    blocks = _split(flat.body, flat.branch_targets)
    _find_reconvergence(blocks)
    params, offset = {}, 0
    for variable in function.params:
        offset = _align(offset, variable.align)
        params[variable.name] = offset
        offset += variable.size or 0
    shared_variables = {v.name: v for v in module.variables.values() if v.space == "shared"}
    shared_variables.update({v.name: v for v in flat.locals.values() if v.space == "shared"})
    used = _symbols(flat.body)
    static = [v for v in shared_variables.values() if v.size is not None and v.name in used]
    shared, static_size = _layout(static)
    dynamic = [v for v in shared_variables.values() if v.size is None]
    static_size = _align(static_size, max((v.align for v in dynamic), default=1))
    shared.update({v.name: static_size for v in dynamic})
    local, local_size = _layout([v for v in flat.locals.values() if v.space in ("local", "param")])
    return Program(
        name, flat.registers, blocks, shared, static_size, local, local_size,
        params, [v.size or 0 for v in function.params], offset, function.directives,
    )  # fmt: skip


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _layout(variables: list[Variable]) -> tuple[dict[str, int], int]:
    offsets, offset = {}, 0
    for variable in variables:
        offset = _align(offset, max(variable.align, 16))
        offsets[variable.name] = offset
        offset += variable.size or 0
    return offsets, offset


def _symbols(body: list[Instruction | Label]) -> set[str]:
    names: set[str] = set()

    def visit(operand: Operand | None) -> None:
        if isinstance(operand, Symbol):
            names.add(operand.name)
        elif isinstance(operand, Address):
            visit(operand.base)
        elif isinstance(operand, (Vector, Group)):
            for item in operand.items:
                visit(item)

    for item in body:
        if isinstance(item, Instruction):
            for operand in item.operands:
                visit(operand)
    return names


class _Inliner:
    """Flattens a function and everything it calls into one body; parameters become variables of the caller."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.registers: list[Register] = []
        self.locals: dict[str, Variable] = {}
        self.branch_targets: dict[str, list[str]] = {}
        self.body: list[Instruction | Label] = []
        self.copies = 0
        self.add(function, "", {}, ())

    def add(self, function: Function, prefix: str, aliases: dict[str, str], stack: tuple[str, ...]) -> None:
        if function.name in stack:
            raise UnknownInstructionError(f"recursive function {function.name} is not modelled")
        first = len(self.registers)
        self.registers += [replace(r, index=first + r.index) for r in function.registers]
        labels = {item.name for item in function.body if isinstance(item, Label)}
        names = dict(aliases)
        names.update({name: prefix + name for name in labels | set(function.locals) | set(function.branch_targets)})
        for name, variable in function.locals.items():
            self.locals[prefix + name] = replace(variable, name=prefix + name)
        for name, targets in function.branch_targets.items():
            self.branch_targets[prefix + name] = [names[t] for t in targets]
        end = f"{prefix}$return"

        def rename(operand: Operand) -> Operand:
            if isinstance(operand, Register):
                return self.registers[first + operand.index]
            if isinstance(operand, Symbol):
                return Symbol(names.get(operand.name, operand.name), operand.offset)
            if isinstance(operand, (Vector, Group)):
                return type(operand)(tuple(rename(item) for item in operand.items))
            if isinstance(operand, Address):
                coordinates = rename(operand.coordinates) if operand.coordinates is not None else None
                return Address(rename(operand.base), operand.offset, coordinates)
            if isinstance(operand, Pair):
                return Pair(rename(operand.first), rename(operand.second))
            if isinstance(operand, Negated):
                return Negated(rename(operand.operand))
            return operand

        for item in function.body:
            if isinstance(item, Label):
                self.body.append(Label(names[item.name]))
                continue
            guard = self.registers[first + item.guard.index] if item.guard is not None else None
            moved = replace(item, operands=tuple(rename(o) for o in item.operands), guard=guard)
            if item.name == "ret" and stack:
                self.body.append(replace(moved, opcode=("bra",), operands=(Symbol(end),)))
            elif item.name == "call" and (callee := self._callee(moved)) is not None:
                if moved.guard is not None:
                    raise UnknownInstructionError(f"line {item.line}: guarded call: {item.text}")
                self._inline(moved, callee, (*stack, function.name))
            else:
                self.body.append(moved)
        if stack:
            self.body.append(Label(end))

    def _callee(self, call: Instruction) -> Function | None:
        names = [o.name for o in call.operands if isinstance(o, Symbol)]
        if not names:
            raise UnknownInstructionError(f"line {call.line}: indirect call: {call.text}")
        callee = self.module.functions.get(names[0])
        return callee if callee is not None and callee.defined else None

    def _inline(self, call: Instruction, callee: Function, stack: tuple[str, ...]) -> None:
        arguments: tuple[Operand, ...] = ()
        results: tuple[Operand, ...] = ()
        seen_name = False
        for operand in call.operands:
            if isinstance(operand, Symbol):
                seen_name = True
            elif isinstance(operand, Group):
                if seen_name:
                    arguments = operand.items
                else:
                    results = operand.items
        aliases = {}
        formals, actuals = [*callee.results, *callee.params], [*results, *arguments]
        if len(formals) != len(actuals):
            raise PtxSyntaxError(f"line {call.line}: {callee.name} takes other arguments: {call.text}")
        for formal, actual in zip(formals, actuals, strict=True):
            if not isinstance(actual, Symbol):
                raise UnknownInstructionError(f"line {call.line}: call argument is no parameter variable: {call.text}")
            aliases[formal.name] = actual.name
        self.copies += 1
        self.add(callee, f"{callee.name}@{self.copies}.", aliases, stack)


def _is_blocking(instruction: Instruction) -> bool:
    if instruction.name == "st" and instruction.has("global"):
        return True  # it may land in several turns
    opcode = instruction.opcode
    if opcode[0] in _BLOCKING:
        return True
    return any(opcode[: len(prefix)] == prefix for prefix in _BLOCKING_PREFIXES)


def _ends_block(instruction: Instruction) -> bool:
    return instruction.name in ("bra", "brx", "ret", "exit", "trap")


def _split(body: list[Instruction | Label], branch_targets: dict[str, list[str]]) -> list[Block]:
    blocks = [Block()]
    labels: dict[str, int] = {}
    for item in body:
        current = blocks[-1]
        if isinstance(item, Label):
            if current.instructions:
                blocks.append(Block())
            labels[item.name] = len(blocks) - 1
            continue
        if _is_blocking(item) and current.instructions:
            blocks.append(Block())
        blocks[-1].instructions.append(item)
        if _ends_block(item):
            blocks.append(Block())
    for number, block in enumerate(blocks):
        following = number + 1 if number + 1 < len(blocks) else EXIT
        last = block.instructions[-1] if block.instructions else None
        if last is None or not _ends_block(last):
            block.successors = [following]
        elif last.name == "bra":
            target = last.operands[0]
            assert isinstance(target, Symbol)
            if target.name not in labels:
                raise PtxSyntaxError(f"line {last.line}: unknown label: {last.text}")
            block.successors = [labels[target.name]] + ([following] if last.guard is not None else [])
        elif last.name == "brx":
            table = last.operands[1]
            assert isinstance(table, Symbol)
            block.successors = [labels[t] for t in branch_targets[table.name]]
            if last.guard is not None:
                block.successors.append(following)
        else:
            block.successors = [EXIT] + ([following] if last.guard is not None else [])
    return blocks


def _find_reconvergence(blocks: list[Block]) -> None:
    """Immediate post-dominators (Cooper, Harvey, Kennedy) with EXIT as the root of the reversed graph."""
    predecessors: dict[int, list[int]] = {number: [] for number in [EXIT, *range(len(blocks))]}
    for number, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].append(number)
    order: list[int] = []
    visited = {EXIT}
    stack = [(EXIT, iter(predecessors[EXIT]))]
    while stack:
        node, rest = stack[-1]
        for predecessor in rest:
            if predecessor not in visited:
                visited.add(predecessor)
                stack.append((predecessor, iter(predecessors[predecessor])))
                break
        else:
            order.append(node)
            stack.pop()
    rank = {node: index for index, node in enumerate(order)}
    parent: dict[int, int] = {EXIT: EXIT}

    def intersect(a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = parent[a]
            while rank[b] < rank[a]:
                b = parent[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == EXIT:
                continue
            known = [s for s in blocks[node].successors if s in parent]
            if not known:
                continue
            best = known[0]
            for successor in known[1:]:
                best = intersect(best, successor)
            if parent.get(node) != best:
                parent[node] = best
                changed = True
    for number, block in enumerate(blocks):
        block.reconvergence = parent.get(number, EXIT)
