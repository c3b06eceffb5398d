"""Prints how large omlx/ is; fails above 400 lines a file or 60 lines a function."""

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES_PER_FILE = 400
MOST_LINES_PER_FUNCTION = 60


class Size(NamedTuple):
    lines: int
    where: str


def sizes_of(module: Path) -> tuple[Size, list[Size]]:
    """The module's size and those of its functions and methods, docstrings included."""
    source = module.read_text(encoding="utf-8")
    where = str(module.relative_to(ROOT))
    functions = [
        Size((node.end_lineno or node.lineno) - node.lineno + 1, f"{where}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Size(len(source.splitlines()), where), functions


def main() -> None:
    files: list[Size] = []
    functions: list[Size] = []
    packages: Counter[str] = Counter()
    for module in sorted((ROOT / "omlx").rglob("*.py")):
        size, inside = sizes_of(module)
        files.append(size)
        functions += inside
        packages[str(module.parent.relative_to(ROOT))] += size.lines
    for package, lines in sorted(packages.items()):
        print(f"{lines:7,}  {package}/")
    print(f"{packages.total():7,}  in all, {len(files)} files")
    print(f"{max(files).lines:7,}  longest file: {max(files).where}")
    print(f"{max(functions).lines:7,}  longest function: {max(functions).where}")
    too_long = [
        f"{size.where} has {size.lines} lines, {most} at most: find the smaller noun in it"
        for sizes, most in ((files, MOST_LINES_PER_FILE), (functions, MOST_LINES_PER_FUNCTION))
        for size in sizes
        if size.lines > most
    ]
    if too_long:
        sys.exit("\n".join(f"size_gate: {line}" for line in too_long))


if __name__ == "__main__":
    main()
