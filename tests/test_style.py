"""The limits that the code keeps, so that no file or function grows past what can be read at once.

A rule is a function from a parsed file to complaints; each is also shown a text that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_ATTRIBUTES = 12
MAX_PUBLIC_METHODS = 15
SHIPPED = ("sonar", "cluster", "launcher")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# Where environment variables may be read: the mains. `sonar.model_source` offers its default to them.
MAINS = ("launcher/cli/main.py", "launcher/agent.py", "launcher/worker_main.py", "sonar/model_source.py")


class Source(NamedTuple):
    """A file of the tree. path: relative to its root."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def shipped_sources() -> list[Source]:
    """The packages' Python files."""
    files = [f for package in SHIPPED for f in sorted((ROOT / package).rglob("*.py"))]
    return [Source(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def other_sources() -> list[Source]:
    """Tests, examples and benchmarks."""
    files = [f for folder in ("tests", "examples", "benchmarks") for f in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def file_too_long(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{source.path}: {lines} lines, at most {MAX_FILE_LINES}; split it by noun"


def function_too_long(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}"


def no_module_docstring(source: Source) -> Iterator[str]:
    if source.text.strip() and ast.get_docstring(source.tree) is None:
        yield f"{source.path}: no docstring that says what the module does and does not know"


def public_without_docstring(source: Source) -> Iterator[str]:
    """Public classes, functions and methods. The methods of a class that "Implements" a contract are told of there."""
    for owner in [source.tree, *(n for n in source.tree.body if isinstance(n, ast.ClassDef))]:
        if isinstance(owner, ast.ClassDef) and (
            owner.name.startswith("_") or "Implements" in (ast.get_docstring(owner) or "")
        ):
            continue
        for node in owner.body:
            named = isinstance(node, FunctionNode | ast.ClassDef) and not node.name.startswith("_")
            if named and ast.get_docstring(node) is None and not _is_override_or_overload(node):
                yield f"{source.path}:{node.lineno} {node.name}: no docstring"


def _is_override_or_overload(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(d).split(".")[-1] in ("override", "overload", "setter") for d in decorators)


def not_annotated(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode) and node.returns is None and not _is_triton(node):
            yield f"{source.path}:{node.lineno} {node.name}: no return annotation"


def _is_triton(node: FunctionNode) -> bool:
    """Whether it is compiled for a GPU: its values have no Python types."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def class_too_wide(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [n.name for n in node.body if isinstance(n, FunctionNode) and not n.name.startswith("_")]
        if len(methods) > MAX_PUBLIC_METHODS:
            yield f"{source.path}:{node.lineno} {node.name}: {len(methods)} public methods of {MAX_PUBLIC_METHODS}"
        stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        attributes = {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}
        if len(attributes) > MAX_ATTRIBUTES:
            yield f"{source.path}:{node.lineno} {node.name}: {len(attributes)} attributes of {MAX_ATTRIBUTES}"


def environment_below_main(source: Source) -> Iterator[str]:
    if source.path in MAINS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            yield f"{source.path}:{node.lineno}: {ast.unparse(node)} below a main; hand the value in"


def pickle(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.split(".")[0] for name in names} & {"pickle", "cloudpickle", "dill", "marshal"}:
            yield f"{source.path}:{node.lineno}: pickle crosses no border here; use msgspec"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    file_too_long,
    function_too_long,
    no_module_docstring,
    public_without_docstring,
    not_annotated,
    class_too_wide,
    environment_below_main,
    pickle,
)
RULES_FOR_TESTS = (file_too_long, function_too_long, no_module_docstring)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_packages_keep_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    complaints = [complaint for source in shipped_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES_FOR_TESTS, ids=lambda rule: rule.__name__)
def test_tests_and_examples_keep_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    complaints = [complaint for source in other_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(complaints)


BROKEN = {
    file_too_long: "x = 1\n" * 601,
    function_too_long: "def f() -> None:\n" + "    x = 1\n" * 80,
    no_module_docstring: "x = 1\n",
    public_without_docstring: '"""d"""\nclass A:\n    """d"""\n    def f(self) -> None: ...\n',
    not_annotated: "def f(): ...\n",
    class_too_wide: "class A:\n    def f(self) -> None:\n" + "".join(f"        self.a{i} = 1\n" for i in range(13)),
    environment_below_main: "import os\nx = os.environ['A']\n",
    pickle: "from pickle import loads\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_can_fail(rule: Callable[[Source], Iterator[str]]) -> None:
    assert len(list(rule(Source("sonar/x.py", BROKEN[rule])))) == 1


def tracked_text_files() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in (data := path.read_bytes())[:8000]:
            yield name, data.decode(errors="replace")


def test_no_package_index_is_named() -> None:
    """Which index a machine uses is that machine's own affair."""
    pattern = re.compile(r"(index-url|find-links)[ =]+(https?:|/)")
    assert [name for name, text in tracked_text_files() if pattern.search(text)] == []


def test_no_file_names_where_this_clone_lies() -> None:
    if len(ROOT.parts) < 3:
        pytest.skip(f"{ROOT} is too short a path to tell from other text")
    assert [name for name, text in tracked_text_files() if f"{ROOT}/" in text] == []


def test_every_folder_of_tests_is_a_package() -> None:
    """Two tests of one name in two folders collide unless both folders are packages."""
    folders = {f.parent for f in (ROOT / "tests").rglob("test_*.py")}
    assert [f.relative_to(ROOT).as_posix() for f in sorted(folders) if not (f / "__init__.py").exists()] == []
