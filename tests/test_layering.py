"""Imports go down only, and what a head runs imports no torch. Read from the source with `ast`; also tried at run time.

The checks are functions of a tree of files, so that a small wrong tree shows that each can fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sonar", "cluster", "launcher")

# What a package may import of the others.
BELOW = {"launcher": {"cluster", "sonar"}, "cluster": {"sonar"}, "sonar": set[str]()}

# Floors of sonar; a module may import its own folder and any lower floor. What is not named here is the base:
# torch-free modules that every floor may use and that use only each other. The longest name that fits counts:
# `models.base` is the contract between weights, layers and models, so it lies below all three.
FLOORS = (
    ("sonar.llm",),
    ("sonar.engine",),
    ("sonar.kvtransfer",),
    ("sonar.scheduler", "sonar.worker"),
    ("sonar.request",),
    ("sonar.kvcache",),
    ("sonar.models",),
    ("sonar.layers", "sonar.weights"),
    ("sonar.attention", "sonar.quant", "sonar.models.base"),
    ("sonar.distributed",),
    ("sonar.ops",),
)
# `sonar` itself offers `LLM` lazily: the one module that looks up.
FACADES = {"sonar"}

# Modules (with all below them) of a process without torch.
TORCH_FREE = (
    "cluster",
    "launcher.agent",
    "sonar.block_hash",
    "sonar.config",
    "sonar.distributed.shard_map",
    "sonar.distributed.stages",
    "sonar.errors",
    "sonar.kvcache",
    "sonar.kvtransfer",
    "sonar.messages",
    "sonar.model_config",
    "sonar.model_source",
    "sonar.peer_messages",
    "sonar.process",
    "sonar.request",
    "sonar.sampling_params",
    "sonar.scheduler",
    "sonar.tokenizer",
    "sonar.transport",
    "sonar.worker.lead",
)
HEAVY = {"torch", "torchvision", "triton"}


class Import(NamedTuple):
    """Module `source` imports `target` in a line; typing: under TYPE_CHECKING, so not at run time."""

    source: str
    target: str
    line: int
    typing: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def module_names(root: Path) -> dict[str, Path]:
    """Every module of the three packages under `root`."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {".".join(f.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def read_imports(modules: dict[str, Path]) -> list[Import]:
    """All imports of all modules, those inside functions too; `from a import b` of a module b counts as a.b."""
    found = []
    for name, file in modules.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node, typing in _import_nodes(ast.parse(file.read_text(encoding="utf-8"))):
            found += [Import(name, target, node.lineno, typing) for target in _targets(node, package, modules)]
    return found


def _import_nodes(tree: ast.AST, typing: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, typing
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for part in node.body:
                yield from _import_nodes(ast.Module([part], []), True)
            for part in node.orelse:
                yield from _import_nodes(ast.Module([part], []), typing)
        else:
            yield from _import_nodes(node, typing)


def _targets(node: ast.Import | ast.ImportFrom, package: str, modules: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]


def is_in(module: str, parent: str) -> bool:
    """Whether a module is `parent` or lies below it; transport_client counts with transport, by the prefix's sense."""
    return module == parent or module.startswith((parent + ".", parent + "_"))


def floor_of(module: str) -> int:
    """Index from the top; the base is the lowest."""
    fits = [(len(parent), floor) for floor, parents in enumerate(FLOORS) for parent in parents if is_in(module, parent)]
    return max(fits)[1] if fits else len(FLOORS)


def upward_imports(imports: list[Import]) -> list[str]:
    """Imports that go up, or sideways between two folders of one floor."""
    wrong = []
    for one in imports:
        source, target = one.source.split(".")[0], one.target.split(".")[0]
        if target not in PACKAGES or one.source in FACADES:
            continue
        if source != target:
            if target not in BELOW[source]:
                wrong.append(str(one))
        elif source == "sonar" and one.target not in FACADES:
            from_floor, to_floor = floor_of(one.source), floor_of(one.target)
            same_folder = one.source.split(".")[1] == one.target.split(".")[1]
            if to_floor < from_floor or (to_floor == from_floor < len(FLOORS) and not same_folder):
                wrong.append(str(one))
    return wrong


def torch_chains(imports: list[Import]) -> list[str]:
    """For each torch-free module that reaches torch at run time, the shortest chain of imports that does."""
    edges: dict[str, list[str]] = {}
    for one in imports:
        if not one.typing and one.source not in FACADES:
            edges.setdefault(one.source, []).append(one.target)
    chains = []
    for start in sorted(module for module in edges if any(is_in(module, free) for free in TORCH_FREE)):
        paths, seen = [[start]], {start}
        for path in paths:  # grows while it is walked: breadth first
            if path[-1].split(".")[0] in HEAVY:
                chains.append(" -> ".join(path))
                break
            for target in edges.get(path[-1], []):
                if target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return chains


def test_imports_go_down_only() -> None:
    wrong = upward_imports(read_imports(module_names(ROOT)))
    assert not wrong, "\n".join(wrong)


def test_what_a_head_runs_reaches_no_torch() -> None:
    chains = torch_chains(read_imports(module_names(ROOT)))
    assert not chains, "\n".join(chains)


def test_every_module_named_here_exists() -> None:
    modules = module_names(ROOT)
    missing = [name for name in TORCH_FREE if not any(is_in(module, name) for module in modules)]
    assert missing == [], "a list that names what has gone checks nothing"


def test_importing_the_torch_free_modules_loads_no_torch() -> None:
    modules = sorted(m for m in module_names(ROOT) if any(is_in(m, free) for free in TORCH_FREE))
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "print('none')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "none\n", done.stderr[-2000:]


def write_tree(root: Path, files: dict[str, str]) -> list[Import]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_imports(module_names(root))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sonar/config.py", "import cluster.head"),
        ("cluster/head.py", "from launcher import agent"),
        ("sonar/ops/table.py", "from sonar.layers import linear"),
        ("sonar/models/llama.py", "def f():\n    from sonar.worker import runner"),
        ("sonar/scheduler/core.py", "import sonar.worker.runner"),
        ("sonar/config.py", "from sonar import ops"),
        ("sonar/kvcache/pool.py", "from ..engine import loop"),
        ("sonar/layers/a.py", "if TYPE_CHECKING:\n    from sonar.models import llama"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    tree = dict.fromkeys(
        (
            "cluster/head.py",
            "launcher/agent.py",
            "sonar/ops/__init__.py",
            "sonar/layers/linear.py",
            "sonar/engine/loop.py",
        ),
        "",
    )
    tree |= {"sonar/worker/runner.py": "", "sonar/models/llama.py": ""}
    wrong = upward_imports(write_tree(tmp_path, tree | {file: text}))
    assert len(wrong) == 1 and wrong[0].startswith(file.removesuffix(".py").replace("/", ".") + ":")


def test_right_imports_pass(tmp_path: Path) -> None:
    tree = {
        "launcher/cli.py": "import cluster.head, sonar.llm",
        "cluster/head.py": "from sonar.messages import Submit\nfrom cluster import state",
        "cluster/state.py": "",
        "sonar/llm.py": "from sonar.engine import loop",
        "sonar/engine/loop.py": "from sonar.worker import runner\nfrom . import other",
        "sonar/engine/other.py": "",
        "sonar/worker/runner.py": "from sonar.kvcache import pool\nfrom sonar.ops.table import OpTable",
        "sonar/kvcache/pool.py": "import sonar.messages",
        "sonar/ops/table.py": "from sonar.errors import UserError",
        "sonar/messages.py": "from sonar.errors import UserError",
        "sonar/errors.py": "",
    }
    assert upward_imports(write_tree(tmp_path, tree)) == []


def test_a_hidden_way_to_torch_is_found(tmp_path: Path) -> None:
    tree = {
        "cluster/head.py": "def f():\n    from sonar import helper",
        "sonar/helper.py": "import sonar.deep",
        "sonar/deep.py": "import torch.nn",
        "sonar/config.py": "if TYPE_CHECKING:\n    import torch",
    }
    assert torch_chains(write_tree(tmp_path, tree)) == ["cluster.head -> sonar.helper -> sonar.deep -> torch.nn"]
