"""Enumerate all small faults that can be planted in a module: places and replacements.

They change comparisons, arithmetic, logic, numbers, conditions and whole statements. They never
change a text or a message, which no test should pin, nor an annotation, which does nothing.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}


@dataclass(frozen=True)
class Fault:
    """``text`` in place of the bytes from ``start`` to ``end`` of a module."""

    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        """Return the module with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def faults_of(source: bytes) -> list[Fault]:
    """Return every fault that can be planted in a module, in the order of their places."""
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    found = set(_Finder(source, begins).faults(ast.parse(source)))
    return sorted(found, key=lambda fault: (fault.start, fault.end, fault.text))


class _Finder:
    def __init__(self, source: bytes, begins: list[int]) -> None:
        self.source, self.begins = source, begins

    def faults(self, node: ast.AST) -> Iterator[Fault]:
        """Yield the faults in ``node`` and all nodes below it."""
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and _is_typing(node)):
            return
        yield from self._own(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "exc", "cause", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.faults(child)

    def _own(self, node: ast.AST) -> Iterator[Fault]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, before, after in zip(node.ops, sides, sides[1:], strict=False):
                yield from self._between(operator, before, after)
        elif isinstance(node, ast.BinOp):
            yield from self._between(node.op, node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            for before, after in zip(node.values, node.values[1:], strict=False):
                yield from self._between(node.op, before, after)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            sign = "not " if isinstance(node.op, ast.Not) else "-"
            yield Fault(self._start(node), self._start(node) + len(sign), "")
        elif isinstance(node, ast.Constant):
            yield from self._number(node)
        elif isinstance(node, ast.Name | ast.Attribute):
            yield from self._name(node)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            inner = self._text(node.test)
            yield Fault(*self._span(node.test), f"not ({inner})")
        elif isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield Fault(*self._span(node), "pass")

    def _between(self, operator: ast.AST, before: ast.expr, after: ast.expr) -> Iterator[Fault]:
        if type(operator) not in _OPERATORS:
            return
        sign, other = _OPERATORS[type(operator)]
        start, end = self._span(before)[1], self._start(after)
        at = self.source.find(sign.encode(), start, end)
        if at >= 0:
            yield Fault(at, at + len(sign), other)

    def _number(self, node: ast.Constant) -> Iterator[Fault]:
        value = node.value
        if isinstance(value, bool):
            yield Fault(*self._span(node), str(not value))
        elif isinstance(value, int):
            yield Fault(*self._span(node), str(value + 1))
        elif isinstance(value, float):
            yield Fault(*self._span(node), repr(2 * value or 1.0))

    def _name(self, node: ast.Name | ast.Attribute) -> Iterator[Fault]:
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in _NAMES:
            end = self._span(node)[1]
            yield Fault(end - len(name), end, _NAMES[name])

    def _start(self, node: ast.AST) -> int:
        return self._span(node)[0]

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.begins[node.lineno - 1] + node.col_offset,
            self.begins[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()


def _is_typing(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
