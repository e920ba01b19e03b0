"""The tutorial for drafters of one's own: its files are written, installed as a package of their own, and run."""

import importlib
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
    """Install what the tutorial's files make, and let this process import it and its test."""
    folder = tmp_path_factory.mktemp("tutorial")
    files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert {"pyproject.toml", "follower_drafter.py", "test_follower_drafter.py"} == set(files)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    installed, tests = folder / "site", folder / "tests"
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(installed), str(folder)]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tests.mkdir()
    (folder / "test_follower_drafter.py").rename(tests / "test_follower_drafter.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tests)
        patch.syspath_prepend(installed)
        yield
    for name in ("follower_drafter", "test_follower_drafter"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_tutorials_test_passes(package):
    module = importlib.import_module("test_follower_drafter")
    (test,) = (each for name, each in vars(module).items() if name.startswith("test_"))
    test()


@pytest.mark.slow
def test_the_tutorials_drafter_runs_in_the_command(package, capsys):
    arguments = ["generate", "--model", TOY_DRAFT, "--max-new-tokens", "12", "--dtype", "float32", "def fibonacci(n):"]
    assert main([*arguments, "--method", "none"]) == 0
    plain = capsys.readouterr().out
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert main([*arguments, "--method", "follower"]) == 0
    assert capsys.readouterr().out == plain
    assert "Chains of the tokens that last followed each token." in listed
    assert "follower" in listed
