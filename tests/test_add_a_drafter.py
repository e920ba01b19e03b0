"""The tutorial for drafters of one's own: its files are written, installed as a package of their own, and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.cli import main
from support.toys import TOY_DRAFT

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = (REPOSITORY / "docs" / "how-to" / "add-a-drafter.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The tutorial's files, and where they are installed."""
    folder = tmp_path_factory.mktemp("tutorial")
    files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert {"pyproject.toml", "follower_drafter.py", "test_follower_drafter.py"} == set(files)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    installed = folder / "site"
    run([sys.executable, "-m", "pip", "install", *flags, "--target", str(installed), str(folder)], folder)
    return folder, installed


def run(command, folder, *paths):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, REPOSITORY / "src"]))}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_tutorials_test_passes(package):
    folder, installed = package
    assert "1 passed" in run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_follower_drafter.py"], folder, installed
    )


@pytest.mark.slow
def test_the_tutorials_drafter_runs_in_the_command(package, capsys):
    folder, installed = package
    both = "import sys; from foredraft.cli import main; sys.exit(main(['methods']) or main(sys.argv[1:]))"
    arguments = ["generate", "--model", TOY_DRAFT, "--max-new-tokens", "12", "--dtype", "float32", "def fibonacci(n):"]
    assert main([*arguments, "--method", "none"]) == 0
    shown = run([sys.executable, "-c", both, *arguments, "--method", "follower"], folder, installed)
    listed, text = shown[: -len(plain := capsys.readouterr().out)], shown[-len(plain) :]
    assert text == plain
    assert "Chains of the tokens that last followed each token." in listed
    assert "follower" in listed
