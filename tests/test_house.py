"""The house rules that no linter knows, as tests."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "foredraft"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CHECKED = sorted(path for folder in ("src", "tests", "scripts") for path in (REPOSITORY / folder).rglob("*.py"))

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
VAGUE_NAMES = {"common.py", "helper.py", "helpers.py", "misc.py", "util.py", "utils.py"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path):
    return path.relative_to(REPOSITORY).as_posix()


def length(function):
    """A function's lines, from its `def` to its last, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def functions(path):
    return [node for node in ast.walk(parsed(path)) if isinstance(node, FUNCTIONS)]


def comments(source):
    reader = io.StringIO(source).readline
    return [
        (token.start[0], token.string) for token in tokenize.generate_tokens(reader) if token.type == tokenize.COMMENT
    ]


EXEMPTION = re.compile(
    r"#\s*(noqa\b(:\s*[A-Z]+[0-9]+([,\s]+[A-Z]+[0-9]+)*)?|type:\s*ignore(\[[^\]]*\])?)", re.IGNORECASE
)


def has_reason(comment):
    """Whether words are left when the exemption itself is taken out of the comment."""
    return len(re.findall(r"[A-Za-z`_]{2,}", EXEMPTION.sub("", comment))) >= 2


def unexplained(source):
    """The lines whose `noqa` or `type: ignore` says no reason beside it."""
    return [line for line, comment in comments(source) if EXEMPTION.search(comment) and not has_reason(comment)]


def is_compiled(function):
    """Whether a decorator is `njit`, called or not, from numba or by itself."""
    targets = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    return any(getattr(target, "id", getattr(target, "attr", None)) == "njit" for target in targets)


def test_there_are_sources_to_look_at():
    assert PACKAGE / "contracts.py" in SOURCES
    assert Path(__file__).resolve() in CHECKED


def test_files_are_short():
    long = {shown(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert not long, f"One file, one noun: split what is longer than {LONGEST_FILE} lines: {long}"


def test_functions_are_short():
    long = {
        f"{shown(path)}:{function.lineno} {function.name}": length(function)
        for path in SOURCES
        for function in functions(path)
        if length(function) > LONGEST_FUNCTION
    }
    assert not long, f"Split functions longer than {LONGEST_FUNCTION} lines (docstrings apart): {long}"


def test_length_leaves_the_docstring_out():
    function = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n').body[0]
    assert length(function) == 2


def test_every_module_says_what_it_does():
    silent = [shown(path) for path in SOURCES if not ast.get_docstring(parsed(path))]
    assert not silent, f"Open with a sentence on what the module does, and does not know: {silent}"


def test_no_module_has_a_vague_name():
    vague = [shown(path) for path in SOURCES if path.name in VAGUE_NAMES]
    assert not vague, f"Name a module after the one thing it holds: {vague}"


def test_the_step_fits_on_a_screen():
    step = next((function for function in functions(PACKAGE / "engine" / "batch.py") if function.name == "step"), None)
    assert step is not None, "engine/batch.py has no function `step`"
    assert length(step) <= LONGEST_FUNCTION


def test_every_exemption_in_the_code_has_a_reason():
    bare = [f"{shown(path)}:{line}" for path in CHECKED for line in unexplained(path.read_text(encoding="utf-8"))]
    assert not bare, f"Write the reason behind the exemption, as in `# noqa: S311  # a seeded example`: {bare}"


@pytest.mark.parametrize(
    ("line", "explained"),
    [
        ("x = 1  # noqa", False),
        ("x = 1  # noqa: S311", False),
        ("x = 1  # noqa: S311, S101", False),
        ("x = 1  # noqa: S311  # a seeded example", True),
        ("x = 1  # type: ignore[arg-type]", False),
        ("x = 1  # type: ignore[arg-type]  # noqa: S311", False),
        ("x = 1  # type: ignore[arg-type]  # T is a dataclass", True),
        ("x = '# noqa'  # words in a string do not count", True),
    ],
)
def test_a_reason_is_words_behind_the_exemption(line, explained):
    assert (unexplained(line + "\n") == []) is explained


def ruff_ignores(config):
    """Every rule that `[tool.ruff.lint]` ignores, for all files and for some."""
    lint = config["tool"]["ruff"]["lint"]
    return [*lint.get("ignore", []), *(rule for rules in lint.get("per-file-ignores", {}).values() for rule in rules)]


def test_every_ruff_ignore_has_a_reason():
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    lint = text[text.index("[tool.ruff.lint]") :]
    explained = re.findall(r'^ +"([A-Z]+[0-9]*)", +# \S+ \S+.*$', lint, re.MULTILINE)
    ignored = ruff_ignores(tomllib.loads(text))
    assert ignored
    assert sorted(ignored) == sorted(explained), (
        "Write each ignored rule on a line of its own, with its reason beside it."
    )


def compiled_functions():
    """{(package, name): place} of what `graph` and `index` compile and show."""
    found = {}
    for path in SOURCES:
        package = path.relative_to(PACKAGE).parts[0]
        for function in functions(path) if package in ("graph", "index") else ():
            if is_compiled(function) and not function.name.startswith("_"):
                found[package, function.name] = f"{shown(path)}:{function.lineno}"
    return found


TWINS = sorted((REPOSITORY / "tests" / "naive").glob("*.py"))
WITHOUT_TWIN = {
    "advance", "credit", "learn_choices", "list_all", "slot_for",
}  # fmt: skip
"""Make several calls in one, hand out memory, or change what a twin of another function is asked about.

tests/test_blend.py and tests/test_retrieval.py say what they do.
"""


def test_every_compiled_function_has_a_slow_twin():
    compiled = {key: place for key, place in compiled_functions().items() if key[1] not in WITHOUT_TWIN}
    assert ("graph", "ancestor_mask") in compiled
    twins = {
        (path.stem.split("_")[0], node.name)
        for path in TWINS
        for node in parsed(path).body
        if isinstance(node, FUNCTIONS)
    }
    lonely = {key: place for key, place in compiled.items() if key not in twins}
    assert not lonely, f"Write a slow, obvious twin of the same name in tests/naive, and compare with it: {lonely}"


def test_every_twin_is_compared_with():
    """By a test, or by another twin."""
    text = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("*.py"))
    used = set(re.findall(r"\bnaive\.\w+\.(\w+)", text))
    used |= {node.id for path in TWINS for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
    idle = [f"{shown(path)}:{node.lineno}" for path in TWINS for node in functions(path) if node.name not in used]
    assert not idle, f"Compare with these twins, or delete them: {idle}"


def public_names(package):
    """What the package shows: names without an underscore that are not modules, whether or not loaded yet."""
    return {
        name for name in dir(package) if not name.startswith("_") and not isinstance(getattr(package, name), ModuleType)
    }


def test_exported_names_are_all_public_names_in_order():
    import foredraft

    exported = list(foredraft.__all__)
    assert exported == sorted(set(exported))
    missing = [name for name in exported if not hasattr(foredraft, name)]
    assert not missing, f"foredraft.__all__ names what cannot be imported: {missing}"
    unlisted = public_names(foredraft) - set(exported)
    assert not unlisted, f"Add to foredraft.__all__, or leave out of foredraft.__dir__: {sorted(unlisted)}"


def test_importing_the_package_does_not_import_torch():
    assert (PACKAGE / "__init__.py").exists(), "src/foredraft/__init__.py is missing"
    code = "import sys, foredraft; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]", "Export lazily (module `__getattr__`), so that `foredraft --help` stays quick."


def test_lines_of_markdown_are_short():
    """Tables, code and generated pages of code aside."""
    long = []
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]:
        code = False
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            code ^= line.startswith("```")
            if len(line) > 160 and not code and not line.lstrip().startswith("|"):
                long.append(f"{path.relative_to(REPOSITORY)}:{number}")
    assert not long, f"Break these lines of Markdown before 160 characters: {long}"


def test_tests_share_through_support_not_through_each_other():
    files = sorted((REPOSITORY / "tests").glob("test_*.py"))
    imported = {
        f"{shown(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(each.name for each in node.names)]
        if name.startswith("test_")
    }
    assert not imported, f"Move what several test files need to tests/support: {sorted(imported)}"
