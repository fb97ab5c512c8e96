"""Compare the names of Keras that the library uses with versions of it: `scripts/test --all`.

Two kinds of names: the entries and the attributes of the registers of private names, and the public
names and keyword arguments that the sources use. Nothing is imported but the register's own
classes. The first time, eight versions take about 15 seconds; answers are kept next to the
versions, so that later checks take two.
"""

import __future__

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import versions
from .jobs import BACKENDS, ROOT
from .sources import Sources, chain, tree

SOURCE = ROOT / "src" / "treadle"
REGISTERS = {
    "core/keras_internals.py": BACKENDS,
    **{f"backends/{name}/patches.py": (name,) for name in BACKENDS},
}
PRIVATE = re.compile(
    r"keras\.src\b|tensorflow\.(python|core|tsl)\b|:__internal__\.|jax\.(_src|extend|interpreters)\b|"
    r"torch(\.utils)?[.:]_|torch\.fx\.experimental\b"
)
ALLOWS_ABSENCE = {"AttributeError", "ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True)
class Use:
    """A use of a public name of Keras: `name`, called with a keyword or not, at a place."""

    name: str
    keyword: str
    place: str


def main(words: list[str] | None = None) -> int:
    """Check versions, print what is missing, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.range.names", description=__doc__)
    default = [*versions.STABLE, versions.NEWEST, versions.NIGHTLY]
    parser.add_argument("versions", nargs="*", default=default)
    chosen = parser.parse_args(words).versions
    failed, skipped = False, []
    for name, folder in versions.unpacked(chosen).items():
        if isinstance(folder, versions.Unreachable):
            skipped.append(name)
            continue
        if isinstance(folder, Exception):
            print(f"names of Keras: {folder}")
            return 2
        shown = f"Keras {versions.version_of(folder)}"
        faults, off = checked(folder)
        for line in faults:
            print(f"{shown}: {line}")
            failed |= name != versions.NIGHTLY
        if off:
            print(f"{shown}, switched off: {', '.join(off)}")
    if skipped:
        reason = "the package index cannot be reached"
        print(f"names of Keras: not checked with {', '.join(skipped)}, since {reason}")
    return int(failed)


def checked(folder: Path) -> tuple[list[str], list[str]]:
    """Return what a version lacks that the library needs, and the names of the other entries."""
    answers = Answers(folder)
    faults = [*private(answers, needed=True), *attributes(answers), *public(answers)]
    off = private(answers, needed=False)
    answers.keep()
    return faults, off


class Answers:
    """What a version lacks, by question, kept in a file next to the version.

    Args:
        root: The folder of the version.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._file = root.with_name(f"{root.name}.json")
        # Answers hold for what gave them.
        files = [Path(__file__).with_name(name) for name in ("names.py", "sources.py")]
        self._program = hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError, KeyError):
            kept = json.loads(self._file.read_text())
            self._known = kept["answers"] if kept["program"] == self._program else {}
        self._sources = {name: Sources(root, name) for name in BACKENDS}
        self._count = len(self._known)

    def __call__(self, backend: str, question: str, answer: Callable[[Sources], str]) -> str:
        key = f"{backend} {question}"
        if key not in self._known:
            self._known[key] = answer(self._sources[backend])
        return self._known[key]

    def keep(self) -> None:
        """Write the file if there are new answers."""
        if len(self._known) > self._count:
            with suppress(OSError):  # a cache folder that only others can write
                kept = {"program": self._program, "answers": self._known}
                self._file.write_text(json.dumps(kept))


def private(answers: Answers, needed: bool) -> list[str]:
    """Return what a version lacks of the registers, once for all backends.

    Args:
        answers: Those of the version.
        needed: The entries that the library cannot work without, each as a sentence; or the others,
            by their names.
    """
    lacking: dict[str, str] = {}
    for register, backends in REGISTERS.items():
        for name, entry in entries(register).items():
            if (entry.need == "core") != needed:
                continue
            question = f"{entry.places} {entry.members} {entry.signatures}"
            for backend in backends:
                if why := answers(backend, question, lambda found, entry=entry: lack(found, entry)):
                    lacking.setdefault(name, why if needed else name)
    return list(lacking.values())


def attributes(answers: Answers) -> list[str]:
    """Return which private attributes of Keras' objects a version does not set, by their module."""
    faults: list[str] = []
    for register in REGISTERS:
        for entry in contents(register)["ATTRIBUTES"].values():
            if entry.module.partition(".")[0] == "keras":
                question = f"attributes {entry.module} {entry.names}"
                fault = answers("torch", question, lambda found, x=entry: _unset(found, x))
                faults += [fault] if fault else []
    return faults


def _unset(found: Sources, entry: Any) -> str:
    path = found.root.joinpath(*entry.module.split("."))
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    words = {word for x in files if x.is_file() for word in re.findall(r"\w+", x.read_text())}
    missing = [name for name in entry.names if name not in words]
    return f"{entry.module} has no {', '.join(missing)}" if missing else ""


def lack(found: Sources, entry: Any) -> str:
    """Return how each place of an entry differs from it, or an empty string if one does not."""
    faults = []
    for place in entry.places:
        if place.partition(".")[0] != "keras":
            return ""
        fault = _fault(found, place, entry)
        if not fault:
            return ""
        faults.append(fault)
    return "; ".join(faults)


def _fault(found: Sources, place: str, entry: Any) -> str:
    target = found.find(place)
    if target is None:
        return f"{place} is missing"
    if gone := [name for name in entry.members if found.attribute(target, name) is None]:
        return f"{place} has no {', '.join(gone)}"
    actual = found.signature(target) if entry.signatures else ""
    if actual and actual not in entry.signatures:
        return f"{place} takes {actual}, expected {' or '.join(entry.signatures)}"
    return ""


def entries(register: str) -> dict[str, Any]:
    """Return the entries of a register."""
    return contents(register)["INTERNALS"]


def private_names() -> dict[str, str]:
    """Return the private names in all registers, each with what it is needed for.

    A public name that is patched is not one; each member of an entry is.
    """
    found: dict[str, str] = {}
    for register in REGISTERS:
        known = contents(register)
        for entry in known["INTERNALS"].values():
            place = entry.places[0].replace(":", ".")
            is_private = PRIVATE.search(entry.places[0])
            for name in [f"{place}.{member}" for member in entry.members] or [place]:
                package, last = name.partition(".")[0], name.rpartition(".")[2]
                if is_private:
                    found.setdefault(name, entry.need)
                elif last.startswith("_") and not last.startswith("__"):
                    found[f"{package}: {last}"] = entry.need
        for attributes in known["ATTRIBUTES"].values():
            package = attributes.module.partition(".")[0]
            for name in attributes.names:
                found.setdefault(f"{package}: {name}", "attribute")
    return found


@cache
def contents(register: str) -> dict[str, Any]:
    """Return the names that a register assigns, without importing its frameworks."""
    sys.path.insert(0, str(ROOT / "src"))
    from treadle.core import internals

    sys.path.remove(str(ROOT / "src"))
    known = {name: getattr(internals, name) for name in dir(internals) if name[0] != "_"}
    for node in tree(SOURCE / register).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef):
            continue
        alone = ast.Module([node], [])
        # Annotations are not evaluated: they may name types of a framework.
        flags = __future__.annotations.compiler_flag
        try:
            exec(compile(alone, register, "exec", flags), known)
        except (NameError, AttributeError, TypeError):
            continue  # it needs what the file imports
        if {"INTERNALS", "ATTRIBUTES"} <= known.keys():  # what follows would import Keras
            break
    return known


def public(answers: Answers) -> list[str]:
    """Return what a version lacks of the public names and keywords that the library uses."""
    faults: dict[str, None] = {}
    for use in uses():
        for backend in BACKENDS:
            fault = answers(backend, f"{use.name} {use.keyword}", lambda x, use=use: _lack(x, use))
            if fault:
                faults[f"no {fault}, see {use.place}"] = None
    return list(faults)


def _lack(found: Sources, use: Use) -> str:
    target = found.dotted(use.name.split("."))
    if target is None:
        return "" if use.keyword else use.name  # which is a use of its own
    if use.keyword and not found.accepts(target, use.keyword):
        return f"{use.name}(…, {use.keyword}=…)"
    return ""


@cache
def uses() -> tuple[Use, ...]:
    """Return the public names of Keras and the keywords that the library uses, each once."""
    found: dict[tuple[str, str], Use] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "keras" not in path.read_text():
            continue
        for name, keyword, line in uses_of(tree(path)):
            place = f"{path.relative_to(ROOT)}:{line}"
            found.setdefault((name, keyword), Use(name, keyword, place))
    return tuple(found.values())


def uses_of(module: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield dotted name, keyword or '', and line of each use, without those that may fail.

    A use may fail in a `try` that handles it; `getattr(keras.optimizers, "Muon", None)` names only
    the module.
    """
    nodes = list(ast.walk(module))
    known = {name: target for node in nodes for name, target in _imported(node)}
    skipped = {  # and, later, parts of longer chains, which come first
        inner
        for node in nodes
        if isinstance(node, ast.Try) and any(_handles_absence(x) for x in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            for _, target in _imported(node):
                yield target, "", node.lineno
        elif isinstance(node, ast.Call) and (name := _dotted(node.func, known)):
            for word in node.keywords:
                if word.arg:
                    yield name, word.arg, node.lineno
        elif isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node, known)):
            while isinstance(node, ast.Attribute):
                node = node.value
                skipped.add(node)
            yield name, "", node.lineno


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name and the dotted target of each import from Keras' public modules."""
    if isinstance(node, ast.Import):
        for each in node.names:
            if each.name.partition(".")[0] == "keras":
                yield (each.asname, each.name) if each.asname else ("keras", "keras")
    elif isinstance(node, ast.ImportFrom) and not node.level:  # not a module of the package
        if (node.module or "").partition(".")[0] != "keras":
            return
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    words = chain(node)
    return ".".join([known[words[0]], *words[1:]]) if words and words[0] in known else ""


def _handles_absence(handler: ast.ExceptHandler) -> bool:
    caught = [handler.type] if handler.type else []
    names = {x.id for node in caught for x in ast.walk(node) if isinstance(x, ast.Name)}
    return bool(names & ALLOWS_ABSENCE)


if __name__ == "__main__":
    sys.exit(main())
