"""Corpus work on Ray: a local cluster of two workers gives the same files, also if a worker is killed."""

import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from foredraft.cli import main
from foredraft.corpus import distributed
from foredraft.corpus.distributed import map_on_ray
from foredraft.corpus.shards import finish_shard, plan_shards, tokenize_shards
from foredraft.corpus.words import Words
from foredraft.errors import ForedraftError, UsageError
from support.toys import TOY

WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Otherwise Ray writes an access token into the user's home folder."""


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this machine's cores, which a caller started who then stops early; most tests are in between."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WITHOUT_TOKEN.items():
            patch.setenv(name, value)
        results = map_on_ray(int, range(20))
        assert next(results) == 0
        import ray  # reads its variables when it is imported, and they were set by then

        here = sys.modules[__name__]
        ray.cloudpickle.register_pickle_by_value(here)  # the workers cannot import the tests
        assert ray.is_initialized()
        yield
        results.close()
        assert not ray.is_initialized(), "a caller who stops early leaves no cluster behind"
        ray.cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture
def words():
    known = {word: number for number, word in enumerate(["the", "cat", "sat", "on", "a", "mat"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=next(iter(known))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Words(tokenizer.to_str(), eos_token_id=5)


@pytest.fixture
def shards(tmp_path):
    rows = [json.dumps({"text": "the cat sat on a mat " * (number % 7 + 1)}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{", ""]))
    return plan_shards([tmp_path / "a.jsonl"], 2000)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tokens")}


def finish_unless_first(shard, *, dying, words, folder):
    """Finish a shard; the first call for shard number `dying` kills its process while the file is being written."""
    marker = Path(folder, "died")
    number, shard = shard

    def progress(_consumed):
        if number == dying and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return finish_shard(shard, words, folder, progress)


def die(item):
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_three(item):
    if item == 3:
        raise UsageError("three is refused")
    return item * item


# --- clusters


@pytest.mark.slow
def test_the_command_makes_the_same_store_on_a_cluster_which_it_starts_and_stops(tmp_path, shards, monkeypatch):
    """The first test of this file, as later ones share a cluster that would be used here too."""
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    for name, value in WITHOUT_TOKEN.items():
        monkeypatch.setenv(name, value)
    for port in (1, 10**20):
        with pytest.raises(UsageError, match=r"^No Ray cluster answers at 127\.0\.0\.1:1"):
            next(map_on_ray(len, [""], f"127.0.0.1:{port}"))
    import ray

    assert not ray.is_initialized()
    build = ["index", "build", str(tmp_path / "a.jsonl"), "--segment-tokens", "1500", "--model", TOY, "--out"]
    assert main([*build, str(tmp_path / "here")]) == main([*build, str(tmp_path / "there"), "--ray"]) == 0
    assert not ray.is_initialized()
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ, "what was set for the cluster is taken back"
    stores = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("here", "there")]
    assert stores[0] == stores[1]
    assert len(stores[0]) > 3


# --- shards


@pytest.mark.slow
def test_the_files_are_those_of_one_process(cluster, tmp_path, shards, words):
    local = list(tokenize_shards(shards, words, tmp_path / "local"))
    told = []
    there = {"spread": map_on_ray, "progress": lambda *at: told.append(at)}
    on_ray = list(tokenize_shards(shards, words, tmp_path / "ray", **there))
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert [(shard.path.name, shard.report) for shard in on_ray] == [(s.path.name, s.report) for s in local]
    assert len(shards) > 4
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == told[-1][2] == sum(shard.bytes for shard in shards)
    again = list(tokenize_shards(shards, words, tmp_path / "ray", spread=map_on_ray))
    assert all(shard.resumed for shard in again)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_costs_its_shard_alone(cluster, tmp_path, shards, words):
    list(tokenize_shards(shards, words, tmp_path / "local"))
    folder = tmp_path / "ray"
    folder.mkdir()
    finish = functools.partial(finish_unless_first, dying=2, words=words, folder=folder)
    finished = list(map_on_ray(finish, enumerate(shards)))
    assert (folder / "died").exists()
    assert not any(shard.resumed for shard in finished), "no shard was made twice to the end"
    assert contents(folder) == contents(tmp_path / "local")
    assert not list(folder.glob("*.building")), "what the killed worker left is cleared"


@pytest.mark.slow
def test_what_strict_refuses_is_refused_in_the_same_words(cluster, tmp_path, shards, words):
    shards = plan_shards([tmp_path / "a.jsonl"], 2000, strict=True)
    with pytest.raises(UsageError) as local:
        list(tokenize_shards(shards, words, tmp_path / "local"))
    with pytest.raises(UsageError) as on_ray:
        list(tokenize_shards(shards, words, tmp_path / "ray", spread=map_on_ray))
    assert str(on_ray.value) == str(local.value)
    assert "is not JSON" in str(on_ray.value)


# --- any function


@pytest.mark.slow
def test_results_come_in_order_and_errors_as_they_were_raised(cluster):
    assert list(map_on_ray(refuse_three, [*range(3), *range(4, 20)])) == [n * n for n in range(20) if n != 3]
    results = map_on_ray(refuse_three, range(20))
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(UsageError, match=r"^three is refused$"):
        next(results)
    assert list(map_on_ray(refuse_three, [])) == []


@pytest.mark.slow
def test_an_item_that_kills_every_worker_is_given_up_with_a_sentence(cluster, monkeypatch):
    monkeypatch.setattr(distributed, "RETRIES", 1)
    with pytest.raises(ForedraftError, match="after 2 workers died"):
        list(map_on_ray(die, [0]))


def test_without_ray_the_remedy_is_named(monkeypatch, tmp_path, words, shards):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'foredraft\[distributed\]'"):
        list(tokenize_shards(shards, words, tmp_path / "ray", spread=map_on_ray))
