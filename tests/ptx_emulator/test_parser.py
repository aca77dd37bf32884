"""The parser and the control-flow analysis on PTX of the shapes that nvcc emits."""

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptx_emulator.errors import PtxSyntaxError, UnknownInstructionError
from ptx_emulator.ir import Address, Immediate, Instruction, Negated, Pair, Register, Sink, Special, Symbol, Vector
from ptx_emulator.lexer import entry_bodies, without
from ptx_emulator.parser import parse
from ptx_emulator.program import EXIT, build

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def function(body: str, before: str = "") -> str:
    return f"{HEADER}{before}\n.visible .entry kernel(.param .u64 p)\n{{\n{body}\nret;\n}}\n"


def instructions(body: str) -> list[Instruction]:
    parsed = parse(function(body)).functions["kernel"]
    return [item for item in parsed.body if isinstance(item, Instruction)][:-1]


REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .f32 %f<4>;"


@given(
    name=st.sampled_from(["add.s32", "mov.b32", "ld.shared::cta.v4.b32", "tcgen05.ld.sync.aligned.32x32b.x2.b32"]),
    registers=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    offset=st.integers(-(2**20), 2**20),
    number=st.integers(-(2**63), 2**64 - 1),
    guard=st.sampled_from(["", "@%p1 ", "@!%p2 "]),
    space=st.sampled_from(["", " ", "\n\t", " /* a, b; */ ", " // c;\n"]),
)
def test_operands_round_trip(name: str, registers: list[int], offset: int, number: int, guard: str, space: str) -> None:
    vector = ",".join(f"{space}%r{i}" for i in registers)
    text = f"{guard}{name}{space} {{{vector}}}{space},[%rd1{offset:+}], {number}, %tid.x, _, %r1|%p3, !%p0;"
    (item,) = instructions(REGISTERS + text)
    assert item.opcode == tuple(name.split("."))
    assert (item.guard is not None, item.guard_negated) == (bool(guard), "!" in guard)
    destination, address, literal, special, sink, pair, negated = item.operands
    assert isinstance(destination, Vector)
    assert [r.name for r in destination.items if isinstance(r, Register)] == [f"%r{i}" for i in registers]
    assert isinstance(address, Address)
    assert address.offset == offset
    assert literal == Immediate(number)
    assert special == Special("tid.x")
    assert sink == Sink()
    assert isinstance(pair, Pair)
    assert isinstance(negated, Negated)


@given(st.floats(width=32, allow_nan=False))
def test_float_literals_keep_their_bits(value: float) -> None:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    (item,) = instructions(f"{REGISTERS} mov.f32 %f1, 0f{bits:08X};")
    assert item.operands[1] == Immediate(bits, 32)


def test_registers_and_labels_are_scoped() -> None:
    """Inline assembly repeats names: every scope has its own."""
    block = "{ .reg .pred P; .reg .b32 %r1; WAIT: mov.b32 %r1, 1; @P bra DONE; bra WAIT; DONE: }"
    items = instructions(REGISTERS + block + block + "mov.b32 %r1, 2;")
    moves = [i.operands[0] for i in items if i.name == "mov"]
    assert len({r.index for r in moves if isinstance(r, Register)}) == 3
    targets = [i.operands[0] for i in items if i.name == "bra"]
    assert len({t.name for t in targets if isinstance(t, Symbol)}) == 4


def test_parts_of_vector_registers_are_registers() -> None:
    first, second = instructions("{ .reg .v2 .f32 both; mov.f32 both.x, 0f3F800000; mov.f32 both.y, both.x; }")
    assert [r.name for r in second.operands if isinstance(r, Register)] == ["both.y", "both.x"]
    assert second.operands[1] == first.operands[0] != second.operands[0]


def test_module_variables() -> None:
    module = parse(
        HEADER
        + ".global .align 4 .b8 text[6] = {104, 105, 0};\n"
        + ".const .align 8 .u64 table[2] = {text+4, generic(text)};\n"
        + ".global .f32 value = 0f3F800000;\n.extern .shared .align 16 .b8 dynamic[];\n"
        + ".visible .global .align 16 .v4 .f32 lanes[3];\n"
    )
    text, table = module.variables["text"], module.variables["table"]
    assert (text.size, text.align, b"".join(v for _, v in text.initial if isinstance(v, bytes))) == (6, 4, b"hi\0")
    assert table.initial == [(0, Symbol("text", 4)), (8, Symbol("text"))]
    assert module.variables["value"].initial == [(0, b"\0\0\x80\x3f")]
    assert module.variables["dynamic"].size is None
    assert module.variables["lanes"].size == 48


@pytest.mark.parametrize(
    "body", ["add.s32 %r1, %r2 %r3;", "mov.b32 %unknown, 1;", "@%q bra X;", "mov.b32 %r1, #;", ".reg .b7 %x;"]
)
def test_syntax_errors_name_the_line(body: str) -> None:
    with pytest.raises(PtxSyntaxError, match=r"line \d+"):
        parse(function(f"{REGISTERS}\n{body}"))


def test_reconvergence_points() -> None:
    """if/else inside a loop: the branch meets at the join, the loop's exit branch behind the loop."""
    body = f"""{REGISTERS}
head:
    @%p1 bra other;
    mov.b32 %r1, 1;
    bra join;
other:
    mov.b32 %r1, 2;
join:
    @%p2 bra head;
    mov.b32 %r2, 3;
"""
    blocks = build(parse(function(body)), "kernel").blocks
    texts = [b.instructions[-1].text if b.instructions else "" for b in blocks]
    join = next(i for i, t in enumerate(texts) if t == "@%p2 bra head;")
    assert blocks[0].reconvergence == join
    assert blocks[join].reconvergence == join + 1
    assert blocks[join + 1].successors == [EXIT]


def test_calls_are_inlined_per_site() -> None:
    callee = """.func (.param .b32 out) twice(.param .b32 in) {
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [in]; add.s32 %r2, %r1, %r1; st.param.b32 [out], %r2; ret; }"""
    call = "{ .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call.uni (b), twice, (a); ld.param.b32 %r1, [b]; }"
    program = build(parse(function(REGISTERS + call + call, callee)), "kernel")
    text = [i for b in program.blocks for i in b.instructions]
    assert [i.name for i in text].count("add") == 2
    assert "call" not in {i.name for i in text}
    loop = callee.replace("add.s32 %r2, %r1, %r1;", "call.uni (out), twice, (in);")
    with pytest.raises(UnknownInstructionError, match="recursive"):
        build(parse(function(REGISTERS + call, loop)), "kernel")


def test_instruction_text_is_kept() -> None:
    (item,) = instructions(REGISTERS + "\n\n  add.s32   %r1, %r2,\n %r3;")
    assert re.sub(r"\s+", " ", item.text) == "add.s32 %r1, %r2, %r3;"
    assert item.line == 9


def test_entries_without_bodies() -> None:
    """Braces in strings, comments and scopes end none; lines keep their numbers."""
    first = '.entry first(.param .u32 n)\n{\n{ // }\nret;\n}\n.pragma "}";\n}\n'
    text = f".visible {first}.section .debug_str\n{{\n.b8 0\n}}\n.weak .entry second()\n{{\nret;\n}}\n"
    bodies = entry_bodies(text)
    assert list(bodies) == ["first", "second"]
    rest = parse(without(text, [bodies["first"]])).functions
    assert rest["first"].defined
    assert not rest["first"].body
    assert rest["second"] == parse(text).functions["second"]
    assert [item.line for item in rest["second"].body] == [14]
