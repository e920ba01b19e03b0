"""Which tokenizer a store belongs to: a hash of its ids and tokens, and how many ids it has.

Knows the `tokenizers` library's vocabulary and nothing else: no text, no model, no files.
"""

import hashlib
import struct

from tokenizers import Tokenizer


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the SHA-256, as hex, over all (id, token) pairs in ascending order, added tokens included.

    Each pair is hashed as the id (uint32), the number of bytes of the token (uint32), both little-endian, and the
    token in UTF-8.
    """
    digest = hashlib.sha256()
    for number, token in sorted((number, token) for token, number in tokenizer.get_vocab(True).items()):
        data = token.encode()
        digest.update(struct.pack("<II", number, len(data)) + data)
    return digest.hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return a number that every id of the tokenizer is below; ids may have gaps."""
    highest = max(tokenizer.get_vocab(True).values(), default=-1)
    return max(tokenizer.get_vocab_size(True), highest + 1)
