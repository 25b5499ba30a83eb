"""Jobs for masked words."""

from tests.support import jobs

SPECIAL = "<|reserved_special_token_0|>"
SIZES = "{dim=32, n_layers=4, n_heads=4, ffn_dim=64, vocab_size=2048, max_seq_len=32, dropout=0.1}"


def job_arguments(folder, texts, **options):
    settings = dict(model__name="roberta", model__overrides=SIZES, model__tokenizer_path="debug")
    settings |= dict(task__kind="masked_lm", task__mask_token=SPECIAL, training__steps=4, optimizer__lr=1e-3)
    settings |= dict(validation__enable=True, validation__dataset="text", validation__dataset_path=texts)
    settings |= dict(validation__samples=12, validation__freq=2, validation__local_batch_size=2)
    return jobs.arguments(folder, texts, **settings | options)
