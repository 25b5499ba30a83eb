"""The bytes of UTF-8 as tokens: needs no file and no training."""

from types import MappingProxyType

from torchtitan.datasets.tokenizer import hf_files
from torchtitan.datasets.tokenizer.base import Range, Tokenizer, offsets_of_bytes, sha256

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 begins a document and 257 ends it."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    special_tokens = MappingProxyType({BOS: 256, EOS: 257})
    fingerprint = sha256(b"bytes, bos 256, eos 257")

    def as_hf_files(self) -> dict[str, bytes]:
        ranks = {bytes([byte]): byte for byte in range(256)}
        return hf_files.files_of(hf_files.byte_level(ranks, self.special_tokens, BOS, None, merges=False), BOS, EOS)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _offsets(self, text: str, ids: list[int]) -> list[Range]:
        return offsets_of_bytes(text, [1] * len(ids))

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
