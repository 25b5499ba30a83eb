"""Prepared shards of given documents."""

from torchtitan.datasets.token_shards import ShardWriter

VOCABULARY = 258


def make(folder, documents, vocab_size=VOCABULARY, shard_tokens=100):
    """Write token shards."""
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size, shard_tokens)
    for document in documents:
        writer.write(document)
    writer.finish(tokenizer="f" * 64, tokenizer_path="bytes")
    return folder
