"""Write a Llama with random weights and the default model's tokenizer, for unpredictable texts and larger passes.

python scripts/random_model.py --out random-130m
python scripts/draft_counts.py --model random-130m --method auto
foredraft bench run --model random-130m --method auto --temperature 1
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import located


def main() -> None:
    """Write the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=768, help="hidden size; a multiple of 64")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(located(SMOLLM2))
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=arguments.width, intermediate_size=8 * arguments.width // 3,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.width // 64,
        num_key_value_heads=arguments.width // 64, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=None, dtype=arguments.dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"{arguments.out}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
