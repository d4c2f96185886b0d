"""How the source is cut: folders without cycles, one class a name, small files. Read from the AST, nothing is imported.

Which package may import which is `test_import_rules`'; here are the rules that hold whatever the folders are called.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PARENTS = (ROOT, ROOT / "kernels", ROOT / "node", ROOT / "client")
PACKAGES = {
    folder.name: folder
    for parent in PARENTS
    for folder in sorted(parent.iterdir())
    if folder.name.startswith("swarm") and (folder / "__init__.py").exists()
}
ELSEWHERE = ("tests", "benchmarks", "examples")  # small files and functions there as well
ARCHITECTURE = ROOT / "docs" / "architecture.md"

MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES = 22, 400, 60


class Module(NamedTuple):
    """One file of the source packages: its dotted name, that of its folder, and where it lies."""

    name: str
    folder: str
    file: Path


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for package, top in PACKAGES.items():
        for file in sorted(top.rglob("*.py")):
            folder = ".".join((package, *file.parent.relative_to(top).parts))
            if file.name == "__main__.py":  # the program of a package: nothing imports it
                continue
            name = folder if file.name == "__init__.py" else f"{folder}.{file.stem}"
            found[name] = Module(name, folder, file)
    return found


@functools.cache
def folders() -> dict[str, list[Module]]:
    found = defaultdict(list)
    for module in modules().values():
        found[module.folder].append(module)
    return dict(found)


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def importing(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports below a node, lazy ones too, but for those that only a type checker sees."""
    if isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING":
        children: list[ast.stmt] = node.orelse
    else:
        children = list(ast.iter_child_nodes(node))  # type: ignore[arg-type]
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from importing(child)


def targets(module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules that an import names; `from package import name` is the module `package.name` where there is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    package = module.folder.split(".")
    base = package[: len(package) - node.level + 1] if node.level else []
    source = ".".join((*base, *([node.module] if node.module else [])))
    for alias in node.names:
        inner = f"{source}.{alias.name}"
        yield inner if inner in modules() else source


def folder_of(target: str) -> str | None:
    """The folder of ours that an imported name lies in: that of the longest known prefix of the name."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module = modules().get(".".join(parts[:length]))
        if module is not None:
            return module.folder
    return None


@functools.cache
def arrows() -> dict[str, dict[str, list[str]]]:
    """folder -> folder that it imports -> the imports, as "module -> target"."""
    found: dict[str, dict[str, list[str]]] = {folder: {} for folder in folders()}
    for module in modules().values():
        for node in importing(tree(module.file)):
            for target in targets(module, node):
                folder = folder_of(target)
                if folder is not None and folder != module.folder:
                    found[module.folder].setdefault(folder, []).append(f"{module.name} -> {target}")
    return found


def knots(graph: dict[str, dict[str, list[str]]]) -> list[set[str]]:
    """The sets of folders that reach each other: each must be of one folder only."""

    def reached(start: str) -> set[str]:
        seen, to_do = set(), [start]
        while to_do:
            for other in graph[to_do.pop()]:
                if other not in seen:
                    seen.add(other)
                    to_do.append(other)
        return seen

    reach = {folder: reached(folder) for folder in graph}
    found: list[set[str]] = []
    for folder in graph:
        knot = {folder, *(other for other in reach[folder] if folder in reach[other])}
        if len(knot) > 1 and knot not in found:
            found.append(knot)
    return found


def public_classes(file: Path) -> set[str]:
    """Names of the classes at the top level of a file, those behind an `if` or in a `try` too."""
    found = set()
    to_do: list[ast.AST] = [tree(file)]
    while to_do:
        for child in ast.iter_child_nodes(to_do.pop()):
            if isinstance(child, ast.ClassDef):
                found.add(child.name)
            elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                to_do.append(child)
    return {name for name in found if not name.startswith("_")}


def all_files() -> list[Path]:
    others = (file for name in ELSEWHERE for file in sorted((ROOT / name).rglob("*.py")))
    return [*(module.file for module in modules().values()), *others]


def in_root(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_no_cycle_between_folders() -> None:
    lines = []
    for knot in knots(arrows()):
        lines.append("these folders import each other: " + ", ".join(sorted(knot)))
        for folder in sorted(knot):
            for other, imports in sorted(arrows()[folder].items()):
                lines += [f"  {line}" for line in sorted(set(imports)) if other in knot]
    assert not lines, "\n".join(lines)


def test_no_two_public_classes_of_one_name() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for module in modules().values():
        for name in public_classes(module.file):
            where[name].append(module.name)
    twice = [f"{name}: {', '.join(places)}" for name, places in sorted(where.items()) if len(places) > 1]
    assert not twice, f"{len(twice)} names of classes are defined more than once:\n" + "\n".join(twice)


def test_the_architecture_names_every_folder() -> None:
    """As `package/folder` or `package.folder`; a tree may name a folder by its own name, as `folder/`."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    alike = Counter(folder.rsplit(".", 1)[-1] for folder in folders())
    missing = [folder for folder in sorted(folders()) if not names(text, folder, alike[folder.rsplit(".", 1)[-1]])]
    assert not missing, f"docs/architecture.md says nothing of {', '.join(missing)}"


def names(text: str, folder: str, alike: int = 1) -> bool:
    """Whether a text names the folder's path, or has its last name in a tree once for each folder of that name."""
    whole = re.escape(folder).replace(r"\.", "[./]")
    if re.search(rf"(?<![\w.]){whole}(?!\w)", text):
        return True
    return len(re.findall(rf"(?m)^\W*{re.escape(folder.rsplit('.', 1)[-1])}/(?!\w)", text)) >= alike


def test_a_folder_can_be_looked_over() -> None:
    sizes = {
        folder: sum(module.file.name != "__init__.py" for module in inside) for folder, inside in folders().items()
    }
    assert not {folder: size for folder, size in sizes.items() if size > MOST_MODULES}


def test_files_are_short() -> None:
    lengths = {in_root(file): len(file.read_text(encoding="utf-8").splitlines()) for file in all_files()}
    assert not {file: length for file, length in lengths.items() if length > MOST_LINES}


def test_functions_are_short() -> None:
    long = []
    for file in all_files():
        if ROOT / "tests" in file.parents:
            continue  # a test may be a long scenario
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    long.append(f"{in_root(file)}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)


def test_nothing_cites_a_document_that_is_not_here() -> None:
    """Sections of "the design" are of no use to a reader who has no such text."""
    cites = re.compile(r"\bdesign,?\s+sections?\b|\bsections? \d+ of the design\b|\bdocs: design\b", re.IGNORECASE)
    found = []
    for file in all_files():
        if file != Path(__file__).resolve():
            text = file.read_text(encoding="utf-8")
            found += [f"{in_root(file)}:{text.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in cites.finditer(text)]
    assert not found, "\n".join(found)


def test_the_rules_see_what_they_should() -> None:
    assert {"swarm", "swarm_kernels", "swarm_node", "swarm_client"} <= set(folders())
    assert "swarm" in arrows()["swarm_client"]
    assert "SwarmError" in public_classes(ROOT / "swarm" / "errors.py")
    assert knots({"a": {"b": []}, "b": {"c": []}, "c": {"b": []}}) == [{"b", "c"}]
    lazy = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    from . import d\n"
    assert [ast.unparse(node) for node in importing(ast.parse(lazy))] == ["import a", "import c", "from . import d"]
    assert names("client/swarm_client/routing/", "swarm_client.routing")
    assert not names("swarm_client/routing_old", "swarm_client.routing")
    assert names("├── routing/   chains", "swarm_client.routing")
    assert not names("├── routing/   chains", "swarm_client.routing", alike=2)
