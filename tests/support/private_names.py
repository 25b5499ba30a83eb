"""Find the private names of torch in a file: imports, paths such as torch._C, and attributes of objects."""

import ast
import re
from collections.abc import Iterator

PRIVATE = re.compile(r"\._[a-z]\w*", re.IGNORECASE)
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of Python's named tuples."""


def torch_imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, bound name and path of each import from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield node.lineno, alias.asname or "torch", alias.name


def private_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and path of each import of something private."""
    yield from ((line, path) for line, _, path in torch_imports(tree) if PRIVATE.search(path))


def private_paths(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and path of each private name that is an attribute of a module or class of torch, as in torch._C.

    The path is the whole one: torch._C._autograd.name.
    """
    names = bound_names(tree)
    for node, root, parts in chains(tree):
        if isinstance(root, ast.Name) and root.id in names:
            path = ".".join([names[root.id], *parts])
            if PRIVATE.search(path):
                yield node.lineno, path


def private_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute of an object that the file's own classes do not define."""
    nodes = list(ast.walk(tree))
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            defined.add(node.attr)
    modules = {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    others = {"super()"} | modules | bound_names(tree).keys()
    for node, root, parts in chains(tree):
        if (start := ast.unparse(root)) in others:
            continue
        parts = parts[1:] if start in ("self", "cls") else parts
        for part in parts:
            if re.match(r"_[a-z]", part) and part not in defined | OF_TUPLES:
                yield node.lineno, part


def bound_names(tree: ast.Module) -> dict[str, str]:
    """Return the file's names of torch's modules, classes and functions, with their paths; of assignments too."""
    names = {name: "torch" if name == "torch" else path for _, name, path in torch_imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            root, _, rest = ast.unparse(node.value).partition(".")
            if isinstance(node.value, ast.Attribute) and root in names:
                names[node.targets[0].id] = f"{names[root]}.{rest}"
    return names


def chains(tree: ast.Module) -> Iterator[tuple[ast.Attribute, ast.expr, list[str]]]:
    """Yield each longest a.b.c: its node, the expression `a`, and the names after it."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                parts.insert(0, root.attr)
                root = root.value
            yield node, root, parts
