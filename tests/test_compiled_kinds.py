"""Compiled models with layers of kinds that others lack: transformers' own texts, drafted, and beside other texts."""

import numpy as np
import pytest
import torch

from foredraft.api import Generator
from foredraft.drafters.none import NoDrafter
from foredraft.model.compiled.build import compile_forward
from foredraft.model.joint_passes import joint_passes
from support.causal_types import tiny_configuration
from support.compilation import compiled_by
from support.families import GREEDY, VOCABULARY, prompt_of, tiny_model, written
from support.scripted import AdversaryDrafter, OracleDrafter, RandomTreeDrafter, continuation_in

NEW_TOKENS = 40
PROMPT = prompt_of(30)
SIZES = {
    "deepseek_v2": {
        "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
        "moe_intermediate_size": 32,
    },
    "gemma3n_text": {"head_dim": 16},
    "gemma4_text": {"head_dim": 16},
    "nemotron_h": {
        "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip
"""Latents and rotation by complex numbers; layers that attend to another one's keys, and products over few numbers, or
heads of two sizes; and layers that keep nothing, and recurrent ones whose steps are limited in a prompt."""


def model_of(family):
    config = tiny_configuration(family)
    for name, value in {"hidden_size": 64, "max_position_embeddings": 1024, **SIZES[family]}.items():
        setattr(config, name, value)
    return tiny_model(config)


def written_in_company(target):
    """The text after `PROMPT` of a batch in which two others begin at other times."""
    writer = Generator(target, None, method="none", nodes=8)
    batch, runs = writer.batch(), []
    for prompt in (PROMPT[:9], PROMPT, PROMPT[5:20]):
        drafter = RandomTreeDrafter(len(prompt), VOCABULARY)
        runs.append(batch.join(writer.begin(prompt, GREEDY, max_new_tokens=NEW_TOKENS, drafter=drafter)))
        batch.step()
    while len(batch):
        batch.step()
    return [token for record in runs[1].records for token in record.emitted]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls
@pytest.mark.parametrize("family", SIZES)
def test_a_compiled_model_writes_transformers_own_text_drafted_and_in_company(family, tmp_path):
    model = model_of(family)
    target = compiled_by(model_of(family), *compile_forward(model_of(family), tmp_path))
    assert target.compiled.record.same_bits
    ids = torch.from_numpy(PROMPT)[None]
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "pad_token_id": 0, "do_sample": False}
    own = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()
    known = continuation_in(np.append(PROMPT, own))
    for drafter in (NoDrafter(), OracleDrafter(known, distractors=1), AdversaryDrafter(known), RandomTreeDrafter(5)):
        assert written(target, PROMPT, GREEDY, drafter, nodes=8, new_tokens=NEW_TOKENS)[0] == own
    assert written_in_company(target) == own
    # what a prompt's tokens leave must be what the same tokens leave when they are written
    assert (joint_passes(target, None) is None) is (family == "nemotron_h")
