"""Fails when a Python file, function or parameter list is too long. Run by `make check`; no exemptions.

Looks at every *.py file that git tracks or would track.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6


def python_files(root: Path) -> list[Path]:
    """Tracked and untracked, not ignored *.py files below `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = {root / name for name in listed.split("\0") if name}
    return sorted(file for file in files if file.is_file())


def problems(path: Path, source: str) -> Iterator[str]:
    """One line per limit that `source` breaks."""
    lines = source.count("\n") + (not source.endswith("\n") and bool(source))
    if lines > MAX_FILE_LINES:
        yield f"{path}:1: {lines} lines; at most {MAX_FILE_LINES}: split the file"
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        length = (node.end_lineno or node.lineno) - first + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}: extract a part"
        positional = [*node.args.posonlyargs, *node.args.args]
        count = len(positional) - (bool(positional) and positional[0].arg in ("self", "cls"))
        is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if count > MAX_POSITIONAL and not is_kernel:  # a kernel takes an address and a stride for each tensor
            yield f"{path}:{node.lineno}: {node.name} takes {count} positional parameters; at most {MAX_POSITIONAL}"


def main() -> int:
    """Check the whole tree; the exit status is 1 when anything is too long."""
    root = Path(__file__).resolve().parents[1]
    found = [line for file in python_files(root) for line in problems(file.relative_to(root), file.read_text())]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
