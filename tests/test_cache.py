"""`foredraft info --cache`: what the cache folder holds, and what of it goes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import filelock
import pytest
import torch

from foredraft.cache_folder import CACHE_VARIABLE, cache_folder
from foredraft.cli import main
from foredraft.model.compiled.package import write_record
from support.compilation import record_of

DAY = 86_400


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def listed(capsys):
    """Return the names of the kept and of the removed entries, as the command prints them."""

    def listed(*arguments):
        assert main(["info", "--cache", *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return tuple({entry["path"].rpartition("/")[2] for entry in found[name]} for name in ("entries", "removed"))

    return listed


def made(path, days=0.0):
    """Make a file that was last used so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    used = time.time() - days * DAY
    os.utime(path, (used, used))


def test_the_folder_may_begin_with_a_tilde_and_one_of_nobody_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, path in {"~/own": "home/own", "~nobody-here/own": "~nobody-here/own"}.items():
        monkeypatch.setenv(CACHE_VARIABLE, named)
        cache_folder()
        assert (tmp_path / path).is_dir()


@pytest.mark.parametrize(("mode", "same"), [(0o700, True), (0o777, False)])
def test_kernels_are_kept_where_the_folder_cannot_be_written_but_not_where_others_can_write(tmp_path, mode, same):
    """One folder for all processes; numba runs the code that it finds there."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {CACHE_VARIABLE: "/dev/null/none", "TMPDIR": str(tmp_path)}
    code = "import foredraft, os; print(os.environ['NUMBA_CACHE_DIR'])"

    def folder():
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return Path(run.stdout.strip())

    first = folder()
    assert first.parent == tmp_path
    first.chmod(mode)
    assert (folder() == first) is same


def test_kernels_run_where_the_disk_is_full(cache):
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "  # no file takes a byte
        "import numpy; from foredraft.sampling.noise import gumbel_noise; print(gumbel_noise(1, 2, numpy.arange(3)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    run = subprocess.run(
        [sys.executable, "-B", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout, run.stderr


def compiled(folder, version):
    folder.mkdir(parents=True)
    write_record(folder, replace(record_of(), torch=version))


def test_costs_go_after_90_days_without_use(cache, listed):
    for days in (0, 89, 91):
        made(cache / f"cost-{days}.json", days)
    assert listed() == ({"cost-0.json", "cost-89.json", "cost-91.json"}, set())
    assert listed("--prune") == ({"cost-0.json", "cost-89.json"}, {"cost-91.json"})
    assert listed("--prune") == ({"cost-0.json", "cost-89.json"}, set())


def test_the_200_costs_that_were_used_last_stay(cache, listed):
    for number in range(203):
        made(cache / f"cost-{number}.json", number / 10)
    kept, removed = listed("--prune")
    assert removed == {f"cost-{number}.json" for number in (200, 201, 202)}
    assert len(kept) == 200


def test_packages_of_another_torch_go_and_those_being_compiled_stay(cache, listed):
    compiled(cache / "compiled/a/same", torch.__version__)
    compiled(cache / "compiled/b/other", "1.0")
    (cache / "compiled/b/killed").mkdir()
    (cache / "compiled/b/running").mkdir()
    (cache / "compiled/b/damaged").mkdir()
    made(cache / "compiled/b/damaged/compiled.json")
    with filelock.FileLock(cache / "compiled/b/running/compiling.wait"):
        assert listed("--prune") == ({"same", "running"}, {"other", "killed", "damaged"})


def test_unfinished_conversions_go_unless_they_go_on(cache, listed):
    for name in ("gguf/a-3", "gguf/b-3.part", "rounded/c-1.part"):
        made(cache / name / "config.json")
    with filelock.FileLock(cache / "rounded/c-1.wait"):
        assert listed("--prune") == ({"a-3", "c-1.part"}, {"b-3.part"})
    assert not (cache / "gguf/b-3.part").exists()


def test_what_is_not_ours_or_still_of_use_is_left(cache, listed):
    (cache / "gguf").mkdir()
    (cache / "gguf/link").symlink_to(cache.parent)
    library = "standard-library-3.12-0.trigrams"
    for name in ("mine.txt", "numba-0.1/a.nbi", library, f"{library}.lock", f"{library}.wait"):
        made(cache / name, 1000)
    assert listed("--prune") == ({"link", "numba-0.1", library}, set())
    assert (cache / "mine.txt").exists()


def test_the_list_says_what_goes_and_why(cache, capsys):
    made(cache / "cost-1.json", 100.2)
    assert main(["info", "--cache"]) == 0
    shown = capsys.readouterr().out
    assert "cost-1.json: its model was not used for 100 days" in shown
    assert "--prune removes: 0.0 MiB (entries: 1)." in shown
    assert main(["info", "--cache", "--prune"]) == 0
    assert "Removed: 0.0 MiB (entries: 1)." in capsys.readouterr().out


def test_a_cache_that_does_not_exist_is_empty(cache, listed):
    cache.rmdir()
    assert listed("--prune") == (set(), set())


def test_pruning_needs_the_cache(capsys):
    assert main(["info", "--prune"]) == 2
    assert "give --cache with it" in capsys.readouterr().err
