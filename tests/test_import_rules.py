"""Imports run one way. Read from the source, so that a lazy import counts as well."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "swarm": ROOT / "swarm",
    "swarm_kernels": ROOT / "kernels" / "swarm_kernels",
    "swarm_hop": ROOT / "node" / "swarm_hop",
    "swarm_node": ROOT / "node" / "swarm_node",
    "swarm_client": ROOT / "client" / "swarm_client",
    "swarm_training": ROOT / "client" / "swarm_training",
    "swarm_gateway": ROOT / "client" / "swarm_gateway",
    "swarm_privacy": ROOT / "client" / "swarm_privacy",
}
OURS = (
    "swarm",
    "swarm_kernels",
    "swarm_hop",
    "swarm_node",
    "swarm_client",
    "swarm_training",
    "swarm_gateway",
    "swarm_privacy",
)
HEAVY = ("torch", "transformers", "triton")

MAY_IMPORT = {
    "swarm": ("swarm",),
    "swarm_kernels": ("swarm", "swarm_kernels"),
    "swarm_hop": ("swarm", "swarm_kernels", "swarm_hop"),
    "swarm_node": ("swarm", "swarm_kernels", "swarm_hop", "swarm_node"),
    "swarm_client": ("swarm", "swarm_kernels", "swarm_hop", "swarm_client"),
    "swarm_training": ("swarm", "swarm_kernels", "swarm_client", "swarm_training"),
    "swarm_gateway": ("swarm", "swarm_client", "swarm_gateway"),
    "swarm_privacy": ("swarm", "swarm_kernels", "swarm_privacy"),
}
SWARM_FOLDERS = {  # a folder of `swarm` -> folders that it may import; the root imports none
    "swarm.planner.cli": ("swarm.planner", "swarm.simulator"),
    "swarm.planner": ("swarm.planner",),
    "swarm.simulator": ("swarm.planner", "swarm.simulator"),
    "swarm.net": ("swarm.net",),
    "swarm.testing": ("swarm.net", "swarm.testing"),
}
NODE_FOLDERS = {  # a folder of the node -> those below it
    "swarm_hop.sharing": (),
    "swarm_hop.auditing": (),
    "swarm_hop.drafting": (),
    "swarm_hop.serving": ("swarm_hop.sharing", "swarm_hop.auditing", "swarm_hop.drafting"),
    "swarm_hop.experts": ("swarm_hop.serving",),
    "swarm_node.owner": (),
    "swarm_node.network": (),
    "swarm_node.service": (),
    "swarm_node.membership": ("swarm_node.owner", "swarm_node.network"),
    "swarm_node.commands": (
        *("swarm_node.owner", "swarm_node.network", "swarm_node.service"),
        *("swarm_node.membership", "swarm_node.node"),
    ),
}
NOT_IN_PLAN = (*HEAVY, "asyncio", "time", "random", "socket", "threading", "secrets", "datetime", "numpy.random")
HIVEMIND_IMPORTER = "swarm.net.libp2p._hivemind"
HIVEMIND_USERS = {
    "swarm.net.libp2p.go_daemon",
    "swarm.net.libp2p.go_daemon_control",
    "swarm.net.dht.directory",
    "swarm.net.dht.lookup",
    "swarm.net.dht.node_ids",
    "swarm.net.dht.protocol",
    "swarm.net.dht.routing_table",
    "swarm.net.libp2p._libp2p",
    "swarm.net.libp2p.py_rpc",
    "swarm.net.libp2p.py_node",
}
LIBP2P_IMPORTER, LIBP2P_USER = "swarm.net.libp2p._libp2p", "swarm.net.libp2p.py_node"
PY_LIBP2P = {"swarm.net.libp2p.py_node", "swarm.net.libp2p.py_host"}  # the thread of trio


def modules() -> Iterator[tuple[str, str, Path]]:
    """(package, dotted name, file) of every module."""
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            yield package, ".".join((package, *parts)).removesuffix(".__init__"), file


@functools.cache
def imports(file: Path, name: str) -> set[str]:
    """Dotted names of all modules that a file imports, anywhere in it."""
    found: set[str] = set()
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join((*base, *([node.module] if node.module else [])))
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def within(module: str, *tops: str) -> bool:
    return any(module == top or module.startswith(top + ".") for top in tops)


ALL = [pytest.param(*module, id=module[1]) for module in modules()]


@pytest.mark.parametrize(("package", "name", "file"), ALL)
def test_imports_run_downwards(package: str, name: str, file: Path) -> None:
    imported = imports(file, name)
    for module in imported:
        if within(module, *OURS):
            assert within(module, *MAY_IMPORT[package]), f"{name} imports {module}"
    if package == "swarm":
        assert not [m for m in imported if within(m, *HEAVY)], f"{name} must not need torch"
    if package == "swarm":
        allowed = next((below for own, below in SWARM_FOLDERS.items() if within(name, own)), ())
        forbidden = [m for m in imported if within(m, *SWARM_FOLDERS) and not within(m, *allowed)]
        assert not forbidden, f"{name} imports {forbidden}"
    if package != "swarm":
        assert not [m for m in imported if within(m, "swarm.simulator", "swarm.testing")], f"{name} is no test"
    if package == "swarm_kernels":
        free = ("swarm.types", "swarm.errors", "swarm.extras")
        allowed = [m for m in imported if within(m, "swarm") and not within(m, *free)]
        assert not [m for m in allowed if m not in ("swarm", "swarm.config") and not within(m, "swarm.config")]


@pytest.mark.parametrize(("package", "name", "file"), [m for m in ALL if within(str(m.values[1]), *NODE_FOLDERS)])
def test_the_node_s_folders_are_layered(package: str, name: str, file: Path) -> None:
    own, below = next((own, below) for own, below in NODE_FOLDERS.items() if within(name, own))
    top = own.split(".")[0] + "."
    assert not [m for m in imports(file, name) if m.startswith(top) and not within(m, own, *below)]


@pytest.mark.parametrize(("package", "name", "file"), [m for m in ALL if within(str(m.values[1]), "swarm.planner")])
def test_the_planner_is_pure(package: str, name: str, file: Path) -> None:
    impure = [m for m in imports(file, name) if within(m, *NOT_IN_PLAN) or within(m, "swarm.net")]
    assert not impure, f"{name} imports {impure}"


@pytest.mark.parametrize(("package", "name", "file"), ALL)
def test_hivemind_is_imported_in_one_place(package: str, name: str, file: Path) -> None:
    imported = imports(file, name)
    if name != HIVEMIND_IMPORTER:
        assert not [m for m in imported if within(m, "hivemind")], f"import hivemind by way of {HIVEMIND_IMPORTER}"
    if any(within(m, HIVEMIND_IMPORTER) for m in imported):
        assert name in HIVEMIND_USERS
    if name != LIBP2P_IMPORTER:
        assert not [m for m in imported if within(m, "libp2p") or (within(m, "trio") and name not in PY_LIBP2P)]
    if any(within(m, LIBP2P_IMPORTER) for m in imported):
        assert name == LIBP2P_USER


def test_the_rules_see_what_they_should() -> None:
    names = {name for _, name, _ in modules()}
    assert {
        "swarm",
        "swarm.codec",
        "swarm.planner",
        "swarm.net.pool.connection_pool",
        "swarm_kernels",
        "swarm_node",
    } <= names
    assert "swarm.errors.ProtocolError" in imports(ROOT / "swarm" / "codec.py", "swarm.codec")
