"""Llamas of a few thousand weights."""

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.families import VOCABULARY

WINDOW = 120


def llama(seed=0, **options):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**shape, **options})).eval()


@functools.cache
def small_model(dtype=torch.float32):
    return llama().to(dtype)


def tiny_llama(vocabulary):
    """As `llama`, with a window of `WINDOW` tokens and weights that write no token for ever."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=WINDOW, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    return model
