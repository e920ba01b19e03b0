"""Datastores of a few documents."""

from foredraft.index.datastore import write_datastore
from support.documents import text_of

VOCABULARY = 300
HASH = "words"


def built(folder, *segments, vocabulary=VOCABULARY, tokenizer_hash=HASH, **options):
    """A store with one segment for each list of documents."""
    with write_datastore(
        folder, tokenizer_hash=tokenizer_hash, vocabulary=vocabulary, create=True, **options
    ) as writer:
        for documents in segments:
            writer.add([text_of(documents, vocabulary)])
        writer.commit()
    return folder
