"""Serve a tiny model, and call it with the clients that people use, unchanged; print what failed.

`python scripts/clients.py FOLDER` installs them there at the first run, from the registries of Python and Node (the
latter only if `npm` is there). The model writes nonsense: what is looked at is that no call fails, and that what was
asked for is there. The exit status is 1 if a call failed.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
TOY = HERE.parent / "tests" / "toy" / "target"
ENVIRONMENTS = {"python": "requirements.txt", "llama-index": "llama-index.txt"}  # that need other versions of `openai`
TEMPLATE = (
    '{% if tools %}<|user|>{{ tools | tojson }} <tool_call>{"name{% endif %}{% for m in messages %}<|{{ m.role }}|>'
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
)  # of Hermes' form


def served(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server of the tiny model with a template that takes tools, and return it and its address."""
    model = folder / "toy"
    shutil.copytree(TOY, model, dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    command = [sys.executable, "-m", "foredraft", "serve", str(model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # what is started is this package
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        if found := re.search(r"http://127[\d.]+:\d+", line):
            return process, found[0]
    raise SystemExit("The server did not start.")


def rows(folder: Path, address: str) -> Iterator[list[str]]:
    """Yield client, kind of call, and problem, of every call."""
    commands = []
    for name, requirements in ENVIRONMENTS.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            venv.create(folder / name, with_pip=True)
            wanted = str(HERE / "clients" / requirements)
            install = [python, "-m", "pip", "install", "--quiet", "--requirement", wanted]
            subprocess.run(install, check=True)  # noqa: S603  # our own command
        commands.append([str(python), str(HERE / "clients" / "calls.py")])
    if shutil.which("npm"):
        for name in ("package.json", "node.mjs"):
            shutil.copy(HERE / "clients" / name, folder)
        if not (folder / "node_modules").exists():
            subprocess.run(["npm", "install", "--silent"], cwd=folder, check=True)  # noqa: S607  # wherever npm is
        commands.append(["node", str(folder / "node.mjs")])
    for command in commands:
        command += [address, "toy"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own command
        sys.stderr.write(run.stderr if run.returncode else "")
        yield from (json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clients are installed")
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    failed = count = 0
    with tempfile.TemporaryDirectory() as place:
        process, address = served(Path(place))
        httpx.get(f"{address}/health").raise_for_status()
        for client, kind, problem in rows(folder, address):
            print(f"{client:24} {kind:24} {problem or 'held'}", flush=True)
            count, failed = count + 1, failed + bool(problem)
        process.terminate()
        process.wait()
    print(f"{count} calls, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
