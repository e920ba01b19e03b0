"""Shared learned counts on disk, in the common container, bound to a tokenizer.

Knows the container and the arrays; does not know who learned them.
"""

from foredraft.errors import StoreError
from foredraft.index.learned import ROW_WIDTH, LearnedArrays, check_learned
from foredraft.index.storage import StoreWriter, open_store

KIND = "learned-counts"


def save_learned(path: str, arrays: LearnedArrays, tokenizer_hash: str, vocabulary: int) -> None:
    """Write `arrays` to `path`; the old file stays until the new one is complete.

    Raises:
        StoreError: the file cannot be written.
    """
    with StoreWriter(path, KIND, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, overwrite=True) as writer:
        for name, array in arrays._asdict().items():
            writer.append(name, array.ravel())


def load_learned(path: str, tokenizer_hash: str) -> LearnedArrays:
    """Read what `save_learned` wrote, into memory.

    Raises:
        StoreError: damaged, or learned with another tokenizer.
    """
    store = open_store(path, KIND)
    if tokenizer_hash and store.tokenizer_hash != tokenizer_hash:
        raise StoreError(f"{path} was learned with another tokenizer. Use another memory file for this model.")
    try:
        slots = len(store.arrays["keys"])
        arrays = LearnedArrays(*(store.arrays[name].copy() for name in LearnedArrays._fields))
        shape = (slots, ROW_WIDTH)
        arrays = arrays._replace(tokens=arrays.tokens.reshape(shape), weights=arrays.weights.reshape(shape))
        check_learned(arrays)
    except (KeyError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}). Delete it to start afresh.") from error
    return arrays
