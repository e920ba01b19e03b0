"""The toy pair that tests write with, and its trained heads: 16 and 1.9 million parameters; see toy/CARD.md."""

from pathlib import Path

from foredraft.corpus.documents import Document
from foredraft.corpus.trigrams import count_trigrams
from foredraft.corpus.words import tokenize, tokenizer_hash

_HERE = Path(__file__).parent / "toy"
TOY, TOY_DRAFT = str(_HERE / "target"), str(_HERE / "draft")
TOY_HEADS = {method: str(_HERE / method) for method in ("eesd", "medusa")}


def text_documents(texts):
    """The texts as documents; their bytes count as consumed."""
    consumed = 0
    for text in texts:
        consumed += len(text.encode())
        if text.strip():
            yield Document(text, consumed)


def build_trigram_table(documents, tokenizer, vocabulary, out, *, batch_characters=4 << 20, **options):
    """Tokenise documents and count their tri-grams."""
    blocks = tokenize(documents, tokenizer, vocabulary, options.get("eos_token_id"), batch_characters=batch_characters)
    count_trigrams(blocks, tokenizer_hash(tokenizer), vocabulary, out, **options)
