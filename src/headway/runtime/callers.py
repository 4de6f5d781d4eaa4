"""Which ranks make a call: what the conditions around it say, in the sources of the functions that led to it.

A call under `if accelerator.is_main_process:` is made by rank 0 alone, and nobody else will come to a collective in it. The live
stack says where the call is; each condition around it is read as every other rank would find it: what names a rank
(`is_main_process`, `process_index`, `get_rank()`, `local_rank` ...) by that rank's number, the rest as it is here. A rank is
out where a condition is certainly false for it.
"""

import ast
import linecache
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from headway.common.callsite import Frame, is_headways, stack

if TYPE_CHECKING:
    from headway.runtime.process import ProcessRuntime

SAVE = "save_state"
"""How a save's first exchange is called, so that who misses it is told by that name."""

_STARTED = time.time()
_MAX_DEPTH = 30
_UNKNOWN: Any = object()
_MAIN = ("is_main_process", "is_world_process_zero", "is_global_zero")
_LOCAL_MAIN = ("is_local_main_process", "is_local_process_zero")
_RANK = ("process_index", "rank", "global_rank", "get_rank", "RANK")
_LOCAL_RANK = ("local_process_index", "local_rank", "get_local_rank", "get_node_local_rank", "LOCAL_RANK")
_WORDS = (*_MAIN, *_LOCAL_MAIN, "is_last_process", *_RANK, *_LOCAL_RANK)
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_COMPUTED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}

Passes = Callable[[int, int], bool]
"""From a rank's number and its number on its machine: does it run the function?"""

Condition = tuple[ast.expr, bool]
"""A test, and what it came out as."""

_chosen: ContextVar[tuple[tuple[str, Passes], ...]] = ContextVar("chosen", default=())


@contextmanager
def only_for(name: str, passes: Passes) -> Iterator[None]:
    """What runs in this block runs on some ranks only.

    Args:
        name: of what chose them, for messages.
        passes: which.
    """
    token = _chosen.set((*_chosen.get(), (name, passes)))
    try:
        yield
    finally:
        _chosen.reset(token)


@dataclass(frozen=True)
class Callers:
    """Who makes the call under way.

    Attributes:
        ranks: those that nothing keeps from it, in order; this one is among them.
        call_site: the user's line.
        reason: what keeps the others from it, where something does.
    """

    ranks: tuple[int, ...]
    call_site: str
    reason: str = ""


def calling_ranks(runtime: "ProcessRuntime") -> Callers:
    """Who makes the call of Headway's that is under way, as far as the sources of its callers say.

    A source that is not there, or was changed after this process began, says nothing.
    """
    everyone = range(runtime.world_size)
    if runtime.world_size == 1:
        return Callers(tuple(everyone), "")
    kept = [rank for rank in everyone if all(passes(rank, _local(runtime, rank)) for _, passes in _chosen.get())]
    reason = f"@accelerator.{_chosen.get()[-1][0]}" if len(kept) < len(everyone) else ""
    called, site = "", ""
    sources = _Sources()
    for frame in stack():
        is_ours = is_headways(frame.f_code.co_filename)
        if not is_ours:
            place = Frame.of(frame)
            site = site or str(place)
            for rank, (line, told) in _kept_out(frame, sources.of(frame), called, runtime, kept).items():
                kept.remove(rank)
                reason = reason or f"{told} ({replace(place, line=line)})"
        if not site or not is_ours:
            called = frame.f_code.co_name
    if runtime.rank not in kept:  # what was read is not what ran
        return Callers(tuple(everyone), site)
    return Callers(tuple(kept), site, reason)


def missed_save(ranks: str, site: str) -> str:
    """What to say where only these ranks ("rank 0") came to a save."""
    return f"save_state was called on {ranks} only, at {site}: call it on every rank, outside conditions on the rank"


def _local(runtime: "ProcessRuntime", rank: int) -> int:
    """The number of a rank on its machine, where all machines have as many."""
    first = runtime.rank - runtime.local_rank
    if first <= rank < first + runtime.local_world_size:
        return rank - first
    return rank % runtime.local_world_size


def _kept_out(
    frame: FrameType, source: "_Source | None", called: str, runtime: "ProcessRuntime", ranks: Sequence[int]
) -> dict[int, tuple[int, str]]:
    """Of these ranks, those that do not come to the line of this frame, with the line and text of the condition that is false."""
    body = None if source is None else source.body(frame)
    if source is None or body is None:
        return {}
    out: dict[int, tuple[int, str]] = {}
    for test, came_out in _conditions(body, frame.f_lineno, called):
        reader = _Reader(frame, source, runtime)
        if reader.truth(test, runtime.rank, False) not in (came_out, _UNKNOWN):
            continue
        for rank in ranks:
            if rank != runtime.rank and rank not in out and _is_out(reader, test, came_out, rank, runtime.rank):
                out[rank] = test.lineno, f"under `if {'' if came_out else 'not '}{ast.unparse(test)}:`"
    return out


def _is_out(reader: "_Reader", test: ast.expr, came_out: bool, rank: int, own: int) -> bool:
    """Is the test certainly otherwise for that rank: whatever the rest of it is, or by what the rest is here?"""
    if reader.truth(test, rank, False) is (not came_out):
        return True
    return reader.truth(test, own, True) is came_out and reader.truth(test, rank, True) is (not came_out)


class _Source:
    """A file as a syntax tree, walked once.

    Args:
        tree: the file's.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._assigned: dict[tuple[type[ast.AST], str], list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._functions.setdefault(node.name, []).append(node)
            targets: Sequence[ast.AST] = ()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                targets = (node.target,)
            value: ast.expr | None = getattr(node, "value", None)
            if value is None:
                continue
            for key in dict.fromkeys((type(each), _named(each)) for each in targets):
                self._assigned.setdefault(key, []).append(value)

    def body(self, frame: FrameType) -> list[ast.stmt] | None:
        """The statements of the function that this frame runs."""
        if frame.f_code.co_name == "<module>":
            return self._tree.body
        for node in self._functions.get(frame.f_code.co_name, ()):
            if min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) == frame.f_code.co_firstlineno:
                return node.body
        return None

    def assigned(self, name: str, kind: type[ast.AST]) -> Sequence[ast.expr]:
        """What is assigned to a variable of that name, or to an attribute of any object."""
        return self._assigned.get((kind, name), ())


class _Sources:
    """The files of one stack, each read once, however many frames are in it."""

    def __init__(self) -> None:
        self._read: dict[str, _Source | None] = {}

    def of(self, frame: FrameType) -> _Source | None:
        """The file of this frame; None where it says nothing."""
        file = frame.f_code.co_filename
        if file not in self._read:
            self._read[file] = self._parse(file, frame)
        return self._read[file]

    def _parse(self, file: str, frame: FrameType) -> _Source | None:
        text = "".join(linecache.getlines(file, frame.f_globals))
        if not any(word in text for word in _WORDS):
            return None
        try:
            if os.path.exists(file) and os.path.getmtime(file) > _STARTED:
                return None
            return _Source(ast.parse(text))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None


# -------------------------------------------------------------------- where the line stands


def _conditions(body: Sequence[ast.stmt], line: int, called: str) -> Iterator[Condition]:
    """What must have held for this line to be reached, outer before inner."""
    for index, node in enumerate(body):
        if not node.lineno <= line <= (node.end_lineno or 0):
            continue
        for earlier in body[:index]:
            yield from _guards(earlier, called)
        if isinstance(node, ast.If | ast.While):
            for block, other, came_out in ((node.body, node.orelse, True), (node.orelse, node.body, False)):
                # A loop's `else` is reached by all; and where both branches make the call, all ranks make it.
                instead = [*other, *(body[index + 1 :] if _leaves(block) else ())]
                if _holds(block, line) and (came_out or isinstance(node, ast.If)) and not _mentions(instead, called):
                    yield node.test, came_out
        blocks = list(_blocks(node))
        for block in blocks:
            yield from _conditions(block, line, called)
        if not blocks:
            yield from _inline(node, called)
        return


def _guards(node: ast.stmt, called: str) -> Iterator[Condition]:
    """What a statement that lies behind must have come out as, to let anyone pass."""
    if isinstance(node, ast.Assert):
        yield node.test, True
    if isinstance(node, ast.If) and _leaves(node.body) != _leaves(node.orelse):
        left, came_out = (node.body, False) if _leaves(node.body) else (node.orelse, True)
        if not _mentions(left, called):
            yield node.test, came_out


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Does nobody come past the end of these statements?"""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func) in ("exit", "quit", "sys.exit", "os._exit")
    return isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The blocks of a statement, those of its handlers and cases too, but not a function's or class's."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _inline(node: ast.AST, called: str) -> Iterator[Condition]:
    """The conditions within a statement: `main and call()`, `call() if main else None`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.BoolOp):
            for index, value in enumerate(inner.values):
                if _calls(value, called):
                    yield from ((before, isinstance(inner.op, ast.And)) for before in inner.values[:index])
        elif isinstance(inner, ast.IfExp) and _calls(inner.body, called) != _calls(inner.orelse, called):
            yield inner.test, _calls(inner.body, called)


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


_OBJECT = "__call__"
"""An object was called, by a name that the stack does not tell: any call may be that one."""


def _mentions(block: Sequence[ast.AST], name: str) -> bool:
    if name == _OBJECT:
        return any(_calls(part, name) for part in block)
    return any(_named(node) == name for part in block for node in ast.walk(part))


def _calls(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Call) and name in (_named(each.func), _OBJECT) for each in ast.walk(node))


def _named(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# -------------------------------------------------------------------- what another rank finds there


class _Reader:
    """Reads expressions of one frame as a given rank would; nothing of the user's is called but attributes.

    Args:
        frame: where names are looked up.
        source: its file.
        runtime: this process.
    """

    def __init__(self, frame: FrameType, source: _Source, runtime: "ProcessRuntime") -> None:
        self._frame = frame
        self._source = source
        self._runtime = runtime
        self._depth = 0

    def truth(self, node: ast.expr, rank: int, knows_rest: bool) -> Any:
        """True, False or unknown.

        Args:
            node: the test.
            rank: whose.
            knows_rest: take what names no rank as it is here and now; else it is unknown.
        """
        value = self._read(node, rank, knows_rest)
        try:
            return value if value is _UNKNOWN else bool(value)
        except Exception:  # such as a tensor of several values
            return _UNKNOWN

    def _read(self, node: ast.AST, rank: int, knows_rest: bool) -> Any:
        if self._depth > _MAX_DEPTH:
            return _UNKNOWN
        self._depth += 1
        try:
            found = self._of_rank(node, rank)
            return self._compose(node, rank, knows_rest) if found is _UNKNOWN else found
        except Exception:  # attributes are the user's code
            return _UNKNOWN
        finally:
            self._depth -= 1

    def _of_rank(self, node: ast.AST, rank: int) -> Any:
        """The value of what names a rank, for that one."""
        if isinstance(node, ast.Call):
            return self._of_call(node, rank)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._of_variable(node.slice.value, rank)
        if not isinstance(node, ast.Attribute | ast.Name):
            return _UNKNOWN
        mine, theirs = self._meaning(_named(node), self._runtime.rank), self._meaning(_named(node), rank)
        if theirs is _UNKNOWN:
            return _UNKNOWN
        here = self._look_up(node)
        # A variable of that name may hold something else, such as -1 where another launcher would have put a number.
        return theirs if here is _UNKNOWN or here == mine else _UNKNOWN

    def _of_call(self, node: ast.Call, rank: int) -> Any:
        name = _named(node.func)
        if name in ("get", "getenv") and node.args and isinstance(node.args[0], ast.Constant):
            return self._of_variable(node.args[0].value, rank)
        return self._meaning(name, rank) if name.isidentifier() and not name.isupper() else _UNKNOWN

    def _of_variable(self, name: object, rank: int) -> Any:
        return str(self._meaning(name, rank)) if name in ("RANK", "LOCAL_RANK") else _UNKNOWN

    def _meaning(self, word: object, rank: int) -> Any:
        local = _local(self._runtime, rank)
        for words, value in (
            (_MAIN, rank == 0),
            (_LOCAL_MAIN, local == 0),
            (_RANK, rank),
            (_LOCAL_RANK, local),
            (("is_last_process",), rank == self._runtime.world_size - 1),
        ):
            if word in words:
                return value
        return _UNKNOWN

    def _compose(self, node: ast.AST, rank: int, knows_rest: bool) -> Any:
        def read(part: ast.AST) -> Any:
            return self._read(part, rank, knows_rest)

        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.BoolOp):
            return _joined([self.truth(part, rank, knows_rest) for part in node.values], isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp):
            value = read(node.operand)
            signs: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
            return _UNKNOWN if value is _UNKNOWN else signs[type(node.op)](value)
        if isinstance(node, ast.Compare):
            values = [read(part) for part in (node.left, *node.comparators)]
            if any(value is _UNKNOWN for value in values):
                return _UNKNOWN
            return all(_COMPARED[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:]))
        if isinstance(node, ast.BinOp):
            values = [read(node.left), read(node.right)]
            return _UNKNOWN if any(v is _UNKNOWN for v in values) else _COMPUTED[type(node.op)](*values)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = [read(part) for part in node.elts]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
        if isinstance(node, ast.NamedExpr):
            return read(node.value)
        if isinstance(node, ast.Call) and _named(node.func) in ("int", "bool", "str") and len(node.args) == 1:
            value = read(node.args[0])
            return _UNKNOWN if value is _UNKNOWN else {"int": int, "bool": bool, "str": str}[_named(node.func)](value)
        return self._variable(node, rank, knows_rest)

    def _variable(self, node: ast.AST, rank: int, knows_rest: bool) -> Any:
        """What a variable is for that rank: by its one assignment, where that names a rank."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return _UNKNOWN
        assigned = {ast.unparse(value): value for value in self._source.assigned(_named(node), type(node))}
        if any(word in text for text in assigned for word in _WORDS):
            return self._read(next(iter(assigned.values())), rank, knows_rest) if len(assigned) == 1 else _UNKNOWN
        return self._look_up(node) if knows_rest else _UNKNOWN

    def _look_up(self, node: ast.AST) -> Any:
        """Its value here and now."""
        if isinstance(node, ast.Attribute):
            owner = self._look_up(node.value)
            return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr, _UNKNOWN)
        if not isinstance(node, ast.Name):
            return _UNKNOWN
        for names in (self._frame.f_locals, self._frame.f_globals):
            if node.id in names:
                return names[node.id]
        return _UNKNOWN


def _joined(values: Sequence[Any], is_or: bool) -> Any:
    """`or`, `and` of values of which some are unknown."""
    if any(value is is_or for value in values):
        return is_or
    return _UNKNOWN if any(value is _UNKNOWN for value in values) else not is_or
