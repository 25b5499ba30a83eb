"""The bytes of UTF-8 as tokens: needs no file and no training."""

from torchtitan.datasets.tokenizer.base import Tokenizer, sha256


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 begins a document and 257 ends it."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = sha256(b"bytes, bos 256, eos 257")

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
