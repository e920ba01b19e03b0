"""Gemma 4's assistants: the text of plain decoding, transformers' own drafts, and which models are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig

from foredraft.api import Generator
from foredraft.contracts import SequenceView
from foredraft.drafters import Resources, make_drafter
from foredraft.errors import UsageError
from foredraft.model.assistant import AssistantRollout, load_assistant
from foredraft.model.layers import LAST
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions
from support import exits
from support.assistants import save_assistant, save_gguf_assistant, sharing_modes, target_model
from support.causal_types import tiny_configuration
from support.families import LONG, NEW_TOKENS, VOCABULARY, prompt_of, tiny_model

SHAPES = {"chain": {"out_degree": 1, "least_probability": 0.0}, "tree": {"out_degree": 3, "least_probability": 0.0}}
SAMPLED = "T=0.7 top_p=0.9"


@pytest.fixture(scope="module", autouse=True)
def mended():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(sharing_modes))
        yield


@pytest.fixture(scope="module")
def target():
    return TorchTarget(target_model())


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    return save_assistant(tmp_path_factory.mktemp("assistant"), target.model)


def drafter_of(target, folder, **options):
    return make_drafter("assistant", {"model": folder, **options}, Resources(VOCABULARY, target=target))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_transformers(shape, target, folder):
    ids = torch.from_numpy(prompt_of(LONG))[None]
    own = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, LONG:].tolist()
    nothing = make_drafter("none", {}, Resources(VOCABULARY))
    texts = {"greedy": own, SAMPLED: exits.written(target, "", SAMPLED, nothing)[0]}
    for setting, text in texts.items():
        drafted, records = exits.written(target, "", setting, drafter_of(target, folder, **SHAPES[shape]))
        assert drafted == text
        assert sum(record.drafted for record in records) > NEW_TOKENS


@torch.inference_mode()
def test_drafts_are_scored_as_by_transformers(target, folder):
    """After a text longer than the window, and after two drafted tokens."""
    ids, end = prompt_of(LONG), LONG - 2
    cache = target.new_cache()
    states = target.prefill(ids[: end - 1].copy(), cache, (LAST,))
    rollout = AssistantRollout(load_assistant(folder, target.model), 4)
    found = [rollout.start(SequenceView(ids[:end], end, states, cache.attended))]
    found += [rollout.expand(ids[[end + row]].astype(np.int32), np.array([row - 1], np.int32)) for row in range(2)]
    text = torch.from_numpy(ids)[None]
    own = target.model(text[:, : end - 1], output_hidden_states=True, return_shared_kv_states=True)
    assistant, state = load_assistant(folder, target.model).model, own.hidden_states[-1][:, -1:]
    for row, scores in enumerate(found):  # as in transformers' SinglePositionMultiTokenCandidateGenerator
        given = torch.cat([target.model.get_input_embeddings()(text[:, end - 1 + row, None]), state], dim=-1)
        made = assistant(
            inputs_embeds=given, position_ids=torch.tensor([[end - 1]]), shared_kv_states=own.shared_kv_states
        )
        torch.testing.assert_close(scores, made.logits[0], atol=1e-5, rtol=1e-5)
        state = made.last_hidden_state


def test_an_assistant_of_a_gguf_file_is_that_of_its_folder(target, folder, tmp_path):
    own = load_assistant(folder, target.model).model
    read = load_assistant(save_gguf_assistant(tmp_path / "it.gguf", own), target.model).model
    assert all(map(torch.equal, own.state_dict().values(), read.state_dict().values()))
    assert all(map(torch.equal, own.buffers(), read.buffers()))
    assert read.config.text_config.to_dict() == own.config.text_config.to_dict()


def test_a_text_in_a_batch_is_the_same(target, folder):
    plain = exits.written(target, "", "greedy", make_drafter("none", {}, Resources(VOCABULARY)))[0]
    writer = Generator(target, None, method="assistant", options={"model": folder}, nodes=8)
    batch, runs = writer.batch(), []
    for prompt in (prompt_of(LONG)[:9], prompt_of(LONG)):
        runs.append(batch.join(writer.begin(prompt, SamplingOptions(), max_new_tokens=NEW_TOKENS)))
        batch.step()
    while len(batch):
        batch.step()
    assert [token for record in runs[1].records for token in record.emitted] == plain


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"backbone_hidden_size": 48}, "hidden states of 48 numbers"), (None, "is a gemma4_text model")],
)
def test_another_target_or_another_kind_of_model_is_refused(changes, says, target, tmp_path):
    if changes is None:
        target.model.save_pretrained(tmp_path)
    else:
        save_assistant(tmp_path, target.model, **changes)
    with pytest.raises(UsageError, match=says):
        drafter_of(target, str(tmp_path))
    with pytest.raises(UsageError, match=r"is a gemma3_text model|is a gemma4_text model"):
        drafter_of(TorchTarget(tiny_model(tiny_configuration("gemma3_text"))), str(tmp_path))
    with pytest.raises(UsageError, match="There is no folder"):
        drafter_of(target, str(tmp_path / "nothing"))


def test_an_assistant_that_lacks_a_weight_or_has_an_odd_configuration_is_refused(target, tmp_path):
    save_assistant(tmp_path, target.model)
    weights, config = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    del weights[next(name for name in weights if name.endswith("down_proj.weight"))]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"has no weight .*down_proj\.weight, which .* random"):
        drafter_of(target, str(tmp_path))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"backbone_hidden_size": "wide"}))
    with pytest.raises(UsageError, match="No model could be loaded from"):
        drafter_of(target, str(tmp_path))
