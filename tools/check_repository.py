"""Check the rules between packages that no linter knows.

* files that every package copies are equal, and so are contracts of one name (`Layout`, `Box`, ...);
* a package imports only the standard library, itself, its hard dependencies, and inside functions its extras
  (a module `triton_kernel.py`, named for an extra, may import that at once);
* no package imports another one of the five;
* docs/plugins.md names every hook.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(ROOT.glob("packages/vescale-*"))
COPIES = ("LICENSE", "src/{module}/_plugins.py", "tests/test_plugins.py")
MODULES = {folder.name.replace("-", "_") for folder in PACKAGES}


def unequal_copies() -> Iterator[str]:
    """Tell the files that differ from the copy of the first package."""
    for pattern in COPIES:
        paths = [folder / pattern.format(module=folder.name.replace("-", "_")) for folder in PACKAGES]
        texts = [path.read_text() for path in paths]
        for path, text in zip(paths, texts, strict=True):
            if text != texts[0]:
                yield f"{relative(path)} differs from {relative(paths[0])}"
    if (ROOT / "LICENSE").read_bytes() != (PACKAGES[0] / "LICENSE").read_bytes():
        yield f"{relative(PACKAGES[0] / 'LICENSE')} differs from LICENSE"


def unequal_contracts() -> Iterator[str]:
    """Tell the classes of hookspecs.py that have one name but several texts."""
    first: dict[str, tuple[Path, str]] = {}
    for path in sorted(ROOT.glob("packages/*/src/*/hookspecs.py")):
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                text = ast.get_source_segment(source, node) or ""
                other, other_text = first.setdefault(node.name, (path, text))
                if text != other_text:
                    yield f"{relative(path)}: class {node.name} differs from the one in {relative(other)}"


def undeclared_imports() -> Iterator[str]:
    """Tell the imports of each package that its pyproject.toml does not declare."""
    for folder in PACKAGES:
        own = folder.name.replace("-", "_")
        hard, extras = declared(folder / "pyproject.toml")
        for path in sorted((folder / "src").rglob("*.py")):
            tree = ast.parse(path.read_text())
            late = {node for scope in deferred(tree) for node in ast.walk(scope)}
            for node in ast.walk(tree):
                allowed = hard | extras if node in late else hard | own_extras(path, extras)
                for module in imported(node):
                    where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
                    if module in MODULES - {own}:
                        yield f"{where}: imports its sibling {module}"
                    elif module not in allowed | {own} | sys.stdlib_module_names:
                        yield f"{where}: {module} is not declared, or an extra outside of a function"


def own_extras(path: Path, extras: set[str]) -> set[str]:
    """Return the extras that a module may import at once: `triton_kernel.py` is there for triton, and imported late."""
    return {extra for extra in extras if path.name.startswith(f"{extra}_")}


def declared(pyproject: Path) -> tuple[set[str], set[str]]:
    """Return the import names of the hard dependencies and of the extras."""
    text = pyproject.read_text()
    hard = text.partition("\ndependencies = [")[2].partition("]")[0]
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return names_in(hard), names_in(extras)


def names_in(requirements: str) -> set[str]:
    """Return the import names of the quoted requirements in a piece of TOML."""
    return {name.replace("-", "_") for name in re.findall(r'"([a-zA-Z0-9_-]+)', requirements)}


def deferred(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the functions of a module and its blocks under TYPE_CHECKING: what an import does not run."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_function or is_types_only:
            yield node


def imported(node: ast.AST) -> list[str]:
    """Return the top-level modules that an import statement names; none for relative imports."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.partition(".")[0]]
    return []


def undocumented_hooks() -> Iterator[str]:
    """Tell the hooks that docs/plugins.md does not mention, and those that it invents."""
    text = (ROOT / "docs" / "plugins.md").read_text()
    hooks = set()
    for path in ROOT.glob("packages/*/src/*/hookspecs.py"):
        body = ast.parse(path.read_text()).body
        hooks |= {node.name for node in body if isinstance(node, ast.FunctionDef)}
    mentioned = set(re.findall(r"`(vescale_\w+)\(", text))
    for hook in sorted(hooks ^ mentioned):
        yield f"docs/plugins.md: {hook} " + ("is not documented" if hook in hooks else "does not exist")


def relative(path: Path) -> str:
    """Return a path as seen from the repository."""
    return str(path.relative_to(ROOT))


def main() -> int:
    """Run all checks and print what they find."""
    checks = (unequal_copies, unequal_contracts, undeclared_imports, undocumented_hooks)
    problems = [problem for check in checks for problem in check()]
    print("\n".join(problems) or f"{len(PACKAGES)} packages keep the rules of the repository")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
