"""Names of dimensions that are arithmetic, as torch's exporter writes them: `2*batch`, `(height//14)*(width//14)`."""

import ast
from collections.abc import Callable, Mapping

_LONGEST = 200
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


class Expression:
    """The value of `text`, from those of the `names` in it; ValueError for a text that is a name, or no arithmetic."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ValueError("too long to be arithmetic")
        try:
            self._tree = ast.parse(text, mode="eval").body
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError("no arithmetic") from error
        if not isinstance(self._tree, ast.BinOp):
            raise ValueError("no arithmetic")
        self.names: set[str] = set()
        self._collect(self._tree)

    def _collect(self, node: ast.expr) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            self._collect(node.left)
            self._collect(node.right)
        elif isinstance(node, ast.Name):
            self.names.add(node.id)
        elif not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise ValueError("no arithmetic")

    def value(self, names: Mapping[str, int]) -> int:
        """Raises ValueError where it divides by 0."""
        return self._value(self._tree, names)

    def _value(self, node: ast.expr, names: Mapping[str, int]) -> int:
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, names), self._value(node.right, names)
            if isinstance(node.op, ast.FloorDiv) and right == 0:
                raise ValueError("divides by 0")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Name):
            return names[node.id]
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]
