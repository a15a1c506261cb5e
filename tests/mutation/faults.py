"""Places of a source file where a small fault can be planted, and a draw among them by seed."""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lsrdecomp"
TOP = "(top)"
"""The room of modules beside the packages."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one file: some bytes of its source, and what stands there instead."""

    path: str  # below the root of the project, with forward slashes
    kind: str
    line: int
    start: int  # bytes from the beginning of the file
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.start}:{self.kind}"

    @property
    def room(self) -> str:
        """The package below ``lsrdecomp`` or its ``lora``; modules beside them are one room."""
        folders = self.path.split("/")[1:-1]
        depth = 2 if folders[:1] == ["lora"] else 1
        return "/".join(folders[:depth]) or TOP

    @property
    def change(self) -> str:
        """What stands there, and what is put in its place."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.kind}: {before[:70]} → {after[:70]}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.change}"

    def planted(self, source: bytes) -> bytes:
        """Return the source with the fault; what stood there must be what was found there."""
        if source[self.start : self.end] != self.before.encode():
            raise ValueError(f"{self.name}: the file has changed since the faults were drawn")
        return source[: self.start] + self.after.encode() + source[self.end :]


def package_faults(root: Path, rooms: Sequence[str] = ()) -> list[Fault]:
    """Return all faults of the package below ``root``, in the order of its files."""
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        found += [f for f in faults(path, file.read_bytes()) if not rooms or f.room in rooms]
    return found


def draw(found: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Draw faults by seed: rooms in turn, a kind of the room, a fault of the kind; a line once.

    Kinds are drawn before places, for half of all places are constants and conditions.
    """
    chance = random.Random(seed)
    rooms: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for fault in found:
        rooms[fault.room][fault.kind].append(fault)
    drawn: list[Fault] = []
    taken: set[tuple[str, int]] = set()
    while rooms and len(drawn) < count:
        # In an order drawn anew: few faults shall not always be of the first rooms
        for room in chance.sample(sorted(rooms), len(rooms)):
            kinds = rooms[room]
            while kinds and len(drawn) < count:
                kind = chance.choice(sorted(kinds))
                places = kinds[kind]
                fault = places.pop(chance.randrange(len(places)))
                if not places:
                    del kinds[kind]
                if (fault.path, fault.line) not in taken:
                    taken.add((fault.path, fault.line))
                    drawn.append(fault)
                    break
            if not kinds:
                del rooms[room]
    return drawn


def faults(path: str, source: bytes) -> list[Fault]:
    """Return the faults that can be planted in one file."""
    return sorted(_Places(path, source).found, key=lambda fault: (fault.start, fault.kind))


SIGNS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"),
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
}
AXIS_WORDS = ("axis", "dim", "axes", "dims")
NO_NUMBERS_OF_THE_PACKAGE = ("stacklevel", "frozen", "slots", "eq", "kw_only", "strict")
"""Keywords whose values change no result: of warnings, of dataclasses, and zip's own check."""


class _Places(ast.NodeVisitor):
    """Collects the faults of one file.

    Left out is what no test of behaviour should hold: annotations, docstrings and texts,
    decorators, what only a type checker reads, and the words of an error.
    """

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.found: list[Fault] = []
        self.returns: list[str] = []
        self.visit(ast.parse(source))

    def add(
        self, kind: str, node: ast.AST, after: str, span: tuple[int, int] | None = None
    ) -> None:
        start, end = span or self.span(node)
        before = self.source[start:end].decode()
        line = self.source[:start].count(b"\n") + 1
        self.found.append(Fault(self.path, kind, line, start, end, before, after))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def between(self, left: ast.AST, right: ast.AST, pattern: str) -> tuple[int, int] | None:
        """Return where the operator between two operands stands."""
        start, end = self.span(left)[1], self.span(right)[0]
        match = re.search(pattern, self.source[start:end].decode())
        # A comment between the operands may hold the same sign
        if match is None or b"#" in self.source[start:end]:
            return None
        return start + match.start(), start + match.end()

    # What is passed over

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts as they are."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("statement", node, "pass")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if "overload" in names:
            return
        self.visit_all([*node.args.defaults, *filter(None, node.args.kw_defaults)])
        self.returns.append(ast.unparse(node.returns) if node.returns else "")
        self.visit_all(node.body)
        self.returns.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        stored = isinstance(target, ast.Attribute | ast.Subscript)
        # Without the first assignment of a name nothing runs at all; without a later one it may
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        again = isinstance(target, ast.Name) and target.id in names
        if self.returns and (stored or again):
            self.add("statement", node, "pass")
        if not (isinstance(target, ast.Name) and target.id.startswith("__")):
            self.visit(node.value)

    def visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # What is changed

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self.add("statement", node, "pass")
        self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        self.add("statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("statement", node, "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("statement", node, "pass")
        if type(node.op) in SIGNS and not _is_text(node.value):
            sign, other = SIGNS[type(node.op)]
            span = self.between(node.target, node.value, re.escape(sign + "="))
            if span:
                self.add("sign", node, other + "=", span)
        self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SIGNS and not (_is_text(node.left) or _is_text(node.right)):
            sign, other = SIGNS[type(node.op)]
            span = self.between(node.left, node.right, re.escape(sign))
            if span:
                self.add("sign", node, other, span)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self.add("sign", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value))
        elif isinstance(value, int):
            self.add("constant", node, str(value + 1))
        elif isinstance(value, float):
            self.add("constant", node, repr(2 * value if value else 1.0))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in NO_NUMBERS_OF_THE_PACKAGE:
            return
        axis = _number(node.value)
        if node.arg in AXIS_WORDS and axis is not None:
            self.add("axis", node.value, str({0: 1, 1: 0, -1: -2, -2: -1}.get(axis, 0)))
            return
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("T", "mT"):
            self.add("axis", node, f"({self.text(node.value)})")
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for part in parts:
            index = _number(part)
            if isinstance(part, ast.Slice):
                for bound in filter(None, (part.lower, part.upper)):
                    self.add("slice", bound, f"({self.text(bound)}) + 1")
                if isinstance(_number(part.step) if part.step else None, int):
                    self.add("slice", part.step, str(-_number(part.step)))
            elif index is not None:
                self.add("slice", part, str({0: -1}.get(index, index - 1 if index > 0 else 0)))
            else:
                self.visit(part)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            pattern, other = COMPARISONS[type(operator)]
            span = self.between(left, right, pattern)
            if span:
                self.add("condition", node, other, span)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        spans = [
            self.between(left, right, rf"\b{word}\b")
            for left, right in zip(node.values, node.values[1:], strict=False)
        ]
        if None not in spans:
            start, end = self.span(node)
            pieces, at = [], start
            for first, last in spans:
                pieces.append(self.source[at:first].decode())
                at = last
            pieces.append(self.source[at:end].decode())
            self.add("condition", node, other.join(pieces))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self.text(node.test):
            self.visit_all(node.orelse)
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and not _is_order(test):
            return  # its sign is changed instead
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.add("condition", test, f"({self.text(test.operand)})")
        else:
            self.add("condition", test, f"not ({self.text(test)})")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or _is_none(node.value):
            return
        self.add("return", node.value, self.wrong(node.value))
        self.visit(node.value)

    def wrong(self, value: ast.expr) -> str:
        """Return another value of the kind that is promised, where that is easy to say."""
        text = f"({self.text(value)})"
        promised = self.returns[-1] if self.returns else ""
        if promised == "bool":
            return f"not {text}"
        if promised in ("int", "float"):
            return f"{text} + 1"
        if isinstance(value, ast.Tuple) and len(value.elts) > 1:
            first, second, *rest = (self.text(element) for element in value.elts)
            return f"({', '.join([second, first, *rest])})"
        return "None"


def _number(node: ast.expr) -> int | None:
    """Return the integer that is written, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    is_integer = isinstance(node, ast.Constant) and type(node.value) is int
    return node.value if is_integer else None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_order(test: ast.Compare) -> bool:
    return isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def lines(fault: Fault, source: bytes) -> Iterator[int]:
    """Yield the lines that the changed bytes stand on."""
    last = source[: fault.end].count(b"\n") + 1
    yield from range(fault.line, last + 1)
