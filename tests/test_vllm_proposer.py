"""The proposer as vLLM makes and calls it, without vLLM: options, rejections, and a server that survives failures."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from foredraft.errors import ForedraftWarning, StoreError, UsageError
from foredraft.index.datastore import write_datastore
from foredraft.integrations import vllm as integration
from foredraft.integrations.vllm import (
    MOST_TOKENS,
    Proposer,
    check_version,
    parse_proposer_options,
    read_options,
)
from support.toys import TOY

WINDOW = 64


def configuration(options=None, most=4, model="nowhere"):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(model=model, tokenizer=model, max_model_len=WINDOW, get_vocab_size=lambda: 8192),
        additional_config={} if options is None else {"foredraft": options},
    )


@pytest.fixture
def vllm(monkeypatch):
    """Return a vLLM module with nothing but a version."""
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def rows(*texts):
    token_ids = np.zeros((3, WINDOW), np.int32)
    for number, text in enumerate(texts):
        token_ids[number, : len(text)] = text
    return [text[-1:] for text in texts], np.array([len(text) for text in texts] + [0] * (3 - len(texts))), token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"table": "none"},
        {"method": "rest", "store": "none"},
        {"method": "adaptix", "table": "none"},
        {"store": "none", "table": "none"},
        {"method": "prompt_lookup"},
    ],
)
def test_a_proposer_is_made_and_called_as_vllm_does(vllm, options):
    proposer = Proposer(configuration(options))
    proposer.load_model(object())
    proposer.dummy_run()
    drafts = proposer.propose(*rows([5, 6, 7, 8, 5, 6], [1], []), slot_mappings=None)
    assert drafts[0][:2] == [7, 8]
    assert drafts[1:] == [[], []]
    assert all(type(token) is int for token in drafts[0])


@pytest.mark.slow
def test_the_embedded_model_is_drafted_for_from_its_own_table(vllm):
    proposer = Proposer(configuration(model=TOY))
    from foredraft.model.loading import load_tokenizer

    ids = load_tokenizer(TOY)("import numpy as np\n\ndef __init__(self").input_ids
    assert proposer.propose(*rows(ids))[0]


def test_the_server_lives_when_the_proposer_raises(vllm, monkeypatch):
    proposer = Proposer(configuration({"table": "none"}))

    def failing(*_):
        raise MemoryError("full")

    monkeypatch.setattr(proposer._requests, "propose", failing)
    with pytest.warns(ForedraftWarning, match="MemoryError: full") as seen:
        drafts = [proposer.propose(*rows([5, 6], [7, 8])) for _ in range(3)]
    assert drafts == [[[], []]] * 3
    assert len(seen) == 1


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "dev", None])
def test_versions_with_another_interface_are_refused(version):
    with pytest.raises(UsageError, match=r"0\.32, 0\.33") as refusal:
        check_version(version)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu", "0.32.0rc1"])
def test_versions_with_the_interface_are_taken(version):
    check_version(version)


def test_vllm_that_is_missing_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        Proposer(configuration())


@pytest.mark.parametrize("most", [0, MOST_TOKENS + 1, "four", None, True])
def test_more_tokens_than_vllm_verifies_are_refused(vllm, most):
    with pytest.raises(UsageError, match="vLLM verifies 1 to 128 drafted tokens"):
        Proposer(configuration(most=most))


REFUSED = {
    "unknown method": ({"method": "adaptics"}, "Did you mean 'adaptix'"),
    "unknown option": ({"tabel": "none"}, "Did you mean 'table'"),
    "method of another type": ({"method": 3}, "give a method's name as text"),
    "feedback": ({"method": "adaptix", "feedback": "topk"}, "passes a proposer no probabilities"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        parse_proposer_options(options)


def test_a_store_for_another_tokenizer_is_refused(vllm, tmp_path):
    folder = tmp_path / "a.store"
    with write_datastore(folder, tokenizer_hash="another", vocabulary=8192, create=True) as writer:
        writer.add([np.array([1, 2, 3, 8192], np.uint16)])
        writer.commit()
    options = {"method": "rest", "store": str(folder)}
    with pytest.raises(StoreError, match="tokenizer"):
        Proposer(configuration(options, model=TOY))
    with pytest.raises(UsageError, match="store is bound to a tokenizer"):
        Proposer(configuration(options, model=str(tmp_path / "no model")))


def test_drafters_that_need_hidden_states_are_refused(vllm, monkeypatch):
    needy = SimpleNamespace(needs=SimpleNamespace(hidden=(-1,)))
    monkeypatch.setattr(integration, "make_drafter", lambda *_: needy)
    with pytest.raises(UsageError, match="hidden states"):
        Proposer(configuration({"table": "none"}))


def test_options_come_from_the_configuration():
    assert read_options({"foredraft": {"method": "rest"}, "other": 1}) == {"method": "rest"}
    assert read_options({"other": 1}) == read_options(None) == {}
    with pytest.raises(UsageError, match="give a mapping"):
        read_options({"foredraft": [1]})
