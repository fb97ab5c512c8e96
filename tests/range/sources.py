"""Reads the names, parameters and classes of an unpacked Keras without importing it.

Importing each version on each backend would take minutes; parsing the modules that are asked for
takes a third of a second for a version.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """A module of Keras, as it is on one backend."""

    sources: "Sources"
    name: str
    path: Path

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """The statement that defines or imports each name, the last one if there are several."""
        found: dict[str, ast.AST] = {}
        for node in self.sources.statements(tree(self.path).body):
            for name in _bound(node):
                found[name] = node
        return found

    @cached_property
    def stars(self) -> list[str]:
        """The modules whose names are all imported."""
        return [
            node.module or ""
            for node in self.sources.statements(tree(self.path).body)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        ]


@dataclass(frozen=True, eq=False)
class Definition:
    """A function, a class or a value, with the module that it is in."""

    module: Module
    node: ast.AST


UNKNOWN = object()
"""What cannot be followed: names of other packages, and results of calls."""


class Sources:
    """An unpacked Keras on one backend.

    Args:
        root: The folder that holds the package.
        backend: The branch of `if backend() == …` that counts.
    """

    def __init__(self, root: Path, backend: str) -> None:
        self.root, self.backend = root, backend
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module, or None if there is none."""
        if name not in self._modules:
            path = self._path(name)
            self._modules[name] = Module(self, name, path) if path else None
        return self._modules[name]

    def _path(self, name: str) -> Path | None:
        # Before 3.11, public modules are in a folder that the package adds to its path.
        for start in (name, name.replace("keras.", "keras.api.", 1)):
            base = self.root.joinpath(*start.split("."))
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def find(self, place: str) -> object:
        """Return what `module`, `module:name` or `module:name.attribute` names, or None."""
        name, _, path = place.partition(":")
        found: object = self.module(name)
        for part in path.split(".") if path else ():
            found = self.attribute(found, part)
        return found

    def dotted(self, words: list[str]) -> object:
        """Return what `keras.ops.add`, divided at its dots, names, or None."""
        found: object = self.module(words[0])
        for part in words[1:]:
            found = self.attribute(found, part)
        return found

    def attribute(self, holder: object, name: str) -> object:
        """Return an attribute of a module or class; None if it has none, or there is no holder."""
        if holder is None or holder is UNKNOWN:
            return holder
        if isinstance(holder, Module):
            return self._in_module(holder, name)
        assert isinstance(holder, Definition)
        if isinstance(holder.node, ast.ClassDef):
            return self._in_class(holder, name)
        return UNKNOWN

    def _in_module(self, module: Module, name: str) -> object:
        node = module.names.get(name)
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            original = next(x.name for x in node.names if (x.asname or x.name) == name)
            if source.partition(".")[0] != "keras":
                return UNKNOWN
            if source == module.name:  # a package imports its own modules
                return self.module(f"{source}.{original}")
            found = self.attribute(self.module(source), original)
            return found if found is not None else self.module(f"{source}.{original}")
        if isinstance(node, ast.Import):
            return UNKNOWN
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            if isinstance(value, ast.Name) and value.id != name:
                return self._in_module(module, value.id) or UNKNOWN
            return UNKNOWN
        if node is not None:
            return Definition(module, node)
        if name.startswith("__") and name.endswith("__"):  # each module has those
            return UNKNOWN
        for star in module.stars:
            found = self.attribute(self.module(star), name)
            if found is not None:
                return found
        return self.module(f"{module.name}.{name}")

    def _in_class(self, holder: Definition, name: str) -> object:
        for cls in self.classes(holder):
            if cls is UNKNOWN:
                return UNKNOWN
            assert isinstance(cls, Definition) and isinstance(cls.node, ast.ClassDef)
            for node in self.statements(cls.node.body):
                if name in _bound(node):
                    return Definition(cls.module, node)
            if name in attributes_set(cls.node):
                return UNKNOWN
        return None

    def classes(self, holder: Definition) -> Iterator[object]:
        """Yield a class and the classes that it is derived from, depth first."""
        yield holder
        assert isinstance(holder.node, ast.ClassDef)
        for base in holder.node.bases:
            words = chain(base)
            found: object = self._in_module(holder.module, words[0]) if words else UNKNOWN
            for part in words[1:]:
                found = self.attribute(found, part)
            if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
                # `class Variable(BackendVariable)` may have the name of what it is derived from.
                if found.node is not holder.node:
                    yield from self.classes(found)
            elif not (words == ["object"] or isinstance(base, ast.Constant)):
                yield UNKNOWN

    def statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield statements, with those of branches that count on this backend."""
        for node in body:
            if isinstance(node, ast.If):
                chosen = _backend_of(node.test)
                if chosen in (None, self.backend):
                    yield from self.statements(node.body)
                if chosen != self.backend:
                    yield from self.statements(node.orelse)
            elif isinstance(node, ast.Try):
                yield from self.statements(node.body)
                for handler in node.handlers:
                    yield from self.statements(handler.body)
            elif isinstance(node, ast.With):
                yield from self.statements(node.body)
            else:
                yield node

    def signature(self, found: object) -> str:
        """Return the parameters of a function or class as `inspect` writes them, or ''."""
        function, method = self._function(found)
        if function is None:
            return ""
        arguments = ast.parse(ast.unparse(function)).body[0].args  # type: ignore[attr-defined]
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        if method:
            del (arguments.posonlyargs or arguments.args)[0]
        return f"({ast.unparse(arguments)})"

    def accepts(self, found: object, keyword: str) -> bool:
        """Return whether a function or class may be called with a keyword argument."""
        if not isinstance(found, Definition):
            return found is UNKNOWN
        if not isinstance(found.node, ast.ClassDef):
            return not isinstance(found.node, Function) or _takes(found.node, keyword) is not False
        for cls in self.classes(found):
            if cls is UNKNOWN:
                return True
            assert isinstance(cls, Definition) and isinstance(cls.node, ast.ClassDef)
            for node in self.statements(cls.node.body):
                made = isinstance(node, Function) and node.name == "__init__"
                if made and (takes := _takes(node, keyword)) is not None:
                    return takes
        return False

    def _function(self, found: object) -> tuple[Function | None, bool]:
        """Return the function that a call runs, and whether its first parameter is bound."""
        if not isinstance(found, Definition):
            return None, False
        if isinstance(found.node, ast.ClassDef):
            start = self.attribute(found, "__init__")
            return self._function(start)[0], True
        return (found.node, False) if isinstance(found.node, Function) else (None, False)


def _takes(function: Function, keyword: str) -> bool | None:
    """Return whether a function takes a keyword; None if that of the base class decides."""
    arguments = function.args
    names = [x.arg for x in (*arguments.args, *arguments.kwonlyargs)]
    if keyword in names:
        return True
    if arguments.kwarg is None:
        return False
    return _takes_rest(function, arguments.kwarg.arg, keyword)


def _takes_rest(function: Function, rest: str, keyword: str) -> bool | None:
    """Return what a function does with a keyword among its `**rest`, as `_takes` does."""
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    forwards = reads = False
    for node, parent in parents.items():
        if not (isinstance(node, ast.Name) and node.id == rest and isinstance(node.ctx, ast.Load)):
            continue
        around = parents[parent]
        if isinstance(parent, ast.keyword) and parent.arg is None:
            assert isinstance(around, ast.Call)
            if ast.unparse(around.func) != "super().__init__":
                return True  # it may take everything
            forwards = True
        elif isinstance(parent, ast.Attribute | ast.Subscript | ast.Compare):
            # `kwargs.pop("name", …)`, `kwargs["name"]` and `"name" in kwargs`
            if any(
                isinstance(x, ast.Constant) and x.value == keyword
                for x in (*ast.iter_child_nodes(parent), *ast.iter_child_nodes(around))
            ):
                return True
            reads = True
        elif isinstance(parent, ast.If | ast.FormattedValue):
            reads = True  # `if kwargs: raise …`
        else:
            return True  # it is kept as a whole
    return None if forwards else not reads


@cache
def tree(path: Path) -> ast.Module:
    """Parse a file, once for all backends."""
    return ast.parse(path.read_text())


@cache
def attributes_set(cls: ast.ClassDef) -> frozenset[str]:
    """Return the attributes that the methods of a class set."""
    return frozenset(
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def chain(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`, or nothing if it is another expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [x.asname or x.name for x in node.names if x.name != "*"]
    if isinstance(node, ast.Import):
        return [x.asname or x.name.partition(".")[0] for x in node.names]
    if isinstance(node, ast.Assign):
        return [
            x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)
        ]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _backend_of(test: ast.expr) -> str | None:
    """Return the name in `backend() == "jax"`, or None if the test is another one."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        called = test.left
        if isinstance(called, ast.Call) and chain(called.func)[-1:] == ["backend"]:
            value = test.comparators[0]
            return value.value if isinstance(value, ast.Constant) else None
    return None
