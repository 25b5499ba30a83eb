"""Tokenizers of every kind, and texts to encode."""

from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets/tokenizer"
KINDS = ["bytes", str(ASSETS / "tiktoken.model"), str(ASSETS / "sentencepiece.model"), str(ASSETS / "tokenizer.json")]
TEXTS = {
    "empty": "",
    "code": "def f(x: int) -> str:\n    return f'{x:>8}'  # eight\n\n\nclass A:\n\tpass\n",
    "unicode": "Grüße, 你好, мир, 👩‍👩‍👧 e\u0301 \u200b\ufeff ﷽",
    "blanks": "  \n\n\t  \r\n a   b    c\n" + " " * 300 + "\n" * 300 + "x ",
    "control": "\x00\x01\x7f\x85",
    "special": "<s></s><|begin_of_text|><|end_of_text|><unk><0x0A><|reserved_special_token_0|>",
}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)
