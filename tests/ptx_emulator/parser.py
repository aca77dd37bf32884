"""PTX tokens to a Module: the dialect that nvcc 13 emits, scoped inline assembly included."""

import re
import struct

from .errors import PtxSyntaxError
from .ir import (
    TYPE_BITS,
    Address,
    Function,
    Group,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from .lexer import Token, tokenize

_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(cluster_ctarank|cluster_nctarank|is_explicit_cluster|laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi"
    r"|clock64|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size"
    r"|aggr_smem_size)$"
)
_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SKIPPED_LINES = {".version", ".address_size", ".file"}


class _Scope:
    """Names visible between one pair of braces."""

    def __init__(self, parent: "_Scope | None", prefix: str) -> None:
        self.parent = parent
        self.prefix = prefix
        self.registers: dict[str, Register] = {}
        self.families: dict[str, tuple[str, int]] = {}
        self.names: dict[str, str] = {}

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.parent
        return None

    def name(self, name: str) -> str:
        """The function-wide unique name of a label or variable declared in a scope."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return name


class Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.position = 0
        self.module = Module("", {}, {}, text)
        self.function: Function | None = None
        self.scope = _Scope(None, "")
        self.scope_count = 0

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def advance(self) -> Token:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.position].text == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            self.fail(f"expected {text!r}, found {self.token.text!r}")
        return self.advance()

    def fail(self, message: str) -> None:
        line = self.token.line
        raise PtxSyntaxError(f"line {line}: {message}: {self.text.splitlines()[line - 1].strip()[:160]}")

    def skip_line(self) -> None:
        line = self.token.line
        while self.token.line == line and self.token.kind != "end":
            self.advance()

    def skip_statement(self) -> None:
        while not self.accept(";"):
            if self.token.kind == "end":
                self.fail("statement without ';'")
            self.advance()

    # -- module ---------------------------------------------------------------------------------------------------

    def parse(self) -> Module:
        while self.token.kind != "end":
            text = self.token.text
            if text == ".target":
                self.advance()
                self.module.target = self.token.text
                self.skip_line()
            elif text in _SKIPPED_LINES:
                self.skip_line()
            elif text in _LINKAGE:
                self.advance()
            elif text in (".entry", ".func"):
                self.parse_function()
            elif text in _SPACES:
                variable = self.parse_variable()
                self.module.variables[variable.name] = variable
            elif text in (".alias", ".pragma", ".attribute"):
                self.skip_statement()
            elif not self.accept(";"):
                self.fail("unexpected statement")
        return self.module

    def parse_variable(self, parameter: bool = False) -> Variable:
        """`.space .align N .type name[dims] = initial`, up to and including `;` (left in place for parameters)."""
        space = self.advance().text[1:].split("::")[0]
        align, element, count = 0, "b8", 1
        while self.token.kind == "directive":
            text = self.advance().text[1:]
            if text == "align":
                align = int(self.advance().text)
            elif text in TYPE_BITS:
                element = text
            elif text in ("v2", "v4"):
                count = int(text[1])
            elif text == "attribute":
                self.parse_group()
            elif text == "ptr":  # pointer hints of kernel parameters
                while self.token.kind == "directive":
                    if self.advance().text == ".align":
                        self.advance()
        name = self.advance().text
        width = TYPE_BITS[element] // 8 * count
        size: int | None = width
        while self.accept("["):
            if self.accept("]"):
                size = None
            else:
                assert size is not None
                size *= self.parse_integer()
                self.expect("]")
        variable = Variable(name, space, align or width, size)
        if self.accept("="):
            self.parse_initial(variable, element, 0)
            if variable.size is None:
                variable.size = max(offset + 8 for offset, _ in variable.initial)
        if not parameter:
            if self.accept(","):
                self.fail("one variable per declaration is supported")
            self.expect(";")
        return variable

    def parse_integer(self) -> int:
        value = self.parse_constant()
        if not isinstance(value, Immediate):
            self.fail("expected a number")
        return value.value  # type: ignore[union-attr]

    def parse_initial(self, variable: Variable, element: str, offset: int) -> int:
        if self.accept("{"):
            while not self.accept("}"):
                offset = self.parse_initial(variable, element, offset)
                self.accept(",")
            return offset
        size = TYPE_BITS[element] // 8
        value = self.parse_constant()
        if isinstance(value, Symbol):
            variable.initial.append((offset, value))
        elif isinstance(value, Immediate):
            bits = value.value
            if value.float_bits and value.float_bits != size * 8:
                bits = _convert_float(value, size * 8)
            variable.initial.append((offset, (bits & ((1 << size * 8) - 1)).to_bytes(size, "little")))
        return offset + size

    def parse_constant(self) -> Immediate | Symbol:
        """A number, symbol, symbol+number, generic(symbol)."""
        negative = False
        while self.token.text in "+-":
            negative ^= self.advance().text == "-"
        token = self.advance()
        if token.kind == "number":
            value = _number(token.text)
            if negative:
                flip = 1 << (value.float_bits - 1) if value.float_bits else 0
                value = Immediate(value.value ^ flip, value.float_bits) if flip else Immediate(-value.value)
            return value
        if token.text == "generic":
            self.expect("(")
            inner = self.parse_constant()
            self.expect(")")
            return self._plus(inner)
        if token.kind == "word":
            return self._plus(Symbol(self.scope.name(token.text)))
        self.fail("expected a constant")
        raise AssertionError

    def _plus(self, value: Immediate | Symbol) -> Immediate | Symbol:
        if isinstance(value, Symbol) and self.token.text in ("+", "-"):
            return Symbol(value.name, value.offset + self.parse_integer())
        return value

    # -- functions ------------------------------------------------------------------------------------------------

    def parse_function(self) -> None:
        is_entry = self.advance().text == ".entry"
        results = self.parse_params() if self.token.text == "(" else []
        name = self.advance().text
        params = self.parse_params() if self.token.text == "(" else []
        function = Function(name, is_entry, params, results)
        while self.token.kind == "directive":
            directive = self.advance().text[1:]
            values = []
            while self.token.kind == "number":
                values.append(_number(self.advance().text).value)
                self.accept(",")
            function.directives[directive] = tuple(values)
            if directive in ("pragma", "attribute"):
                self.skip_statement() if directive == "pragma" else self.parse_group()
        if self.accept(";"):
            self.module.functions.setdefault(name, function)
            return
        self.function = function
        self.scope = _Scope(None, "")
        function.defined = True
        self.module.functions[name] = function
        self.expect("{")
        self.parse_body()
        self.function = None
        self.scope = _Scope(None, "")

    def parse_params(self) -> list[Variable]:
        self.expect("(")
        params = []
        while not self.accept(")"):
            if self.token.text == ".reg":
                self.fail("functions with register parameters are not supported")
            params.append(self.parse_variable(parameter=True))
            self.accept(",")
        return params

    def parse_body(self) -> None:
        """Statements up to the closing brace of the current scope."""
        function = self.function
        assert function is not None
        self._declare_labels()
        while not self.accept("}"):
            token = self.token
            text = token.text
            if text == "{":
                self.advance()
                self.scope_count += 1
                self.scope = _Scope(self.scope, f"{self.scope_count}.")
                self.parse_body()
                assert self.scope.parent is not None
                self.scope = self.scope.parent
            elif text == ".reg":
                self.parse_registers()
            elif text in _SPACES:
                variable = self.parse_variable()
                unique = self.scope.prefix + variable.name
                self.scope.names[variable.name] = unique
                variable.name = unique
                function.locals[unique] = variable
            elif text == ".file":
                self.skip_line()
            elif text == ".pragma":
                self.skip_statement()
            elif self.accept(";"):
                pass
            elif token.kind == "word" and self.tokens[self.position + 1].text == ":":
                self.position += 2
                label = self.scope.name(text)
                if self.accept(".branchtargets"):
                    targets = [self.scope.name(self.advance().text)]
                    while self.accept(","):
                        targets.append(self.scope.name(self.advance().text))
                    self.expect(";")
                    function.branch_targets[label] = targets
                elif self.token.text == ".callprototype":
                    self.skip_statement()
                else:
                    function.body.append(Label(label))
            elif token.kind in ("word", "punct"):
                function.body.append(self.parse_instruction())
            else:
                self.fail("unexpected statement")

    def _declare_labels(self) -> None:
        """Labels are visible in their whole scope, so a forward branch needs them before they are reached."""
        depth = 0
        for index in range(self.position, len(self.tokens)):
            text = self.tokens[index].text
            if text == "{":
                depth += 1
            elif text == "}":
                depth -= 1
                if depth < 0:
                    return
            elif depth == 0 and text == ":" and self.tokens[index - 2].text in ("{", "}", ";", ":"):
                name = self.tokens[index - 1].text
                self.scope.names[name] = self.scope.prefix + name

    def parse_registers(self) -> None:
        function = self.function
        assert function is not None
        self.advance()
        type_name = self.advance().text[1:]
        parts = {"v2": ".x .y", "v4": ".x .y .z .w"}.get(type_name, "").split()  # by which alone they are named here
        if parts:
            type_name = self.advance().text[1:]
        if type_name not in TYPE_BITS:
            self.fail(f"unknown register type .{type_name}")
        while True:
            name = self.advance().text
            names = [name]
            if self.accept("<"):
                names = [f"{name}{index}" for index in range(self.parse_integer())]
                self.expect(">")
            for each in [each + part for each in names for part in parts or [""]]:
                register = Register(each, len(function.registers), type_name)
                function.registers.append(register)
                self.scope.registers[each] = register
            if not self.accept(","):
                break
        self.expect(";")

    # -- instructions ---------------------------------------------------------------------------------------------

    def parse_instruction(self) -> Instruction:
        start = self.token
        guard, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            guard = self.scope.register(self.advance().text)
            if guard is None:
                self.fail("unknown predicate")
        opcode = self.advance()
        if opcode.kind != "word":
            self.fail("expected an instruction")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.parse_operand())
            # `call (result), function, (arguments)` and a few instructions omit commas around groups
            if not self.accept(",") and self.token.text not in (";", "[", "{", "("):
                self.fail("expected ',' or ';'")
        text = self.text[start.start : self.tokens[self.position - 1].end]
        return Instruction(tuple(opcode.text.split(".")), tuple(operands), guard, negated, start.line, text)

    def parse_operand(self) -> Operand:
        token = self.token
        if token.text == "{":
            return self.parse_vector()
        if token.text == "[":
            return self.parse_address()
        if token.text == "(":
            return self.parse_group()
        if token.text == "!":
            self.advance()
            return Negated(self.parse_operand())
        if token.text == "_":
            self.advance()
            value: Operand = Sink()
        elif token.kind == "word" and (register := self.scope.register(token.text)) is not None:
            self.advance()
            value = register
        elif token.kind == "word" and token.text.startswith("%"):
            self.advance()
            if not _SPECIAL.match(token.text):
                self.fail(f"unknown register {token.text}")
            value = Special(token.text[1:])
        else:
            value = self.parse_constant()
        if self.accept("|"):
            return Pair(value, self.parse_operand())
        return value

    def parse_vector(self) -> Vector:
        return Vector(self.parse_operands("{", "}"))

    def parse_group(self) -> Group:
        return Group(self.parse_operands("(", ")"))

    def parse_operands(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.expect(opening)
        items = []
        while not self.accept(closing):
            items.append(self.parse_operand())
            self.accept(",")
        return tuple(items)

    def parse_address(self) -> Address:
        self.expect("[")
        base = self.parse_operand()
        offset = 0
        while self.token.text in ("+", "-"):
            offset += self.parse_integer()
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset + offset
        coordinates = None
        if self.accept(","):
            coordinates = self.parse_vector()
        self.expect("]")
        return Address(base, offset, coordinates)


def _number(text: str) -> Immediate:
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16), 32)
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16), 64)
    if "." in text:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return Immediate(int(text.rstrip("U"), 0))


def _convert_float(value: Immediate, bits: int) -> int:
    """The bits of a float literal in another width."""
    number = struct.unpack(
        "<f" if value.float_bits == 32 else "<d", value.value.to_bytes(value.float_bits // 8, "little")
    )
    codes = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[bits]
    return int(struct.unpack(codes[1], struct.pack(codes[0], number[0]))[0])


def parse(text: str) -> Module:
    """Parse a PTX module; raises PtxSyntaxError naming the line."""
    return Parser(text).parse()
