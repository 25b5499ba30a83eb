"""The flags of train_neurocache.py, of Neurocache's authors, with their defaults of August 2024, and two that it had
before. neurocache.py looks at each in one place.
"""

from torchtitan.importers.flags import Flag

SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")

FLAGS: dict[str, Flag] = {
    "model_name_or_path": Flag(str),
    "dataset_name": Flag(str),
    "tokenizer_name": Flag(str),
    "train_split": Flag(str, "train"),
    "eval_split": Flag(str, "validation"),
    "test_split": Flag(str, "test"),
    "per_device_batch_size": Flag(int),  # which it had instead of the next two
    "per_device_train_batch_size": Flag(int, 2),
    "per_device_eval_batch_size": Flag(int, 4),
    "sequence_length": Flag(int, 1024),
    "gradient_accumulation_steps": Flag(int, 8),
    "max_train_steps": Flag(int, 25_000),
    "max_eval_steps": Flag(int, 250),
    "evaluate_every_steps": Flag(int, 500),
    "checkpointing_steps": Flag(int, 2_000),
    "keep_n_checkpoints": Flag(int, 2),
    "logging_steps": Flag(int, 100),
    "learning_rate": Flag(float, 1e-4),
    "num_warmup_steps": Flag(int, 1_000),
    "lr_scheduler_type": Flag(str, "cosine", SCHEDULES),
    "weight_decay": Flag(float, 0.0),
    "max_grad_norm": Flag(float, 1.0),
    "seed": Flag(int, 1_234_567),
    "nf4": Flag(bool, False),
    "disable_grad_checkpointing": Flag(bool, False),
    "disable_lora": Flag(bool, False),
    "lora_r": Flag(int, 32),
    "lora_alpha": Flag(float, 64.0),
    "lora_dropout": Flag(float, 0.1),
    "lora_modules": Flag(str, "gate_proj,up_proj,down_proj"),
    "disable_neurocache": Flag(bool, False),
    "only_evaluate": Flag(bool, False),
    "pretrained_neurocache": Flag(str),
    "save_and_quit": Flag(bool, False),
    "resume_from_checkpoint": Flag(str, ""),
    "output_dir": Flag(str),
    "with_tracking": Flag(bool, True),
    "report_to": Flag(str, "tensorboard"),
    "cache_size": Flag(int, 16_384),
    "cache_type": Flag(str, "fifo", ("fifo", "lru")),
    "cache_dtype": Flag(str, "bfloat16", ("bfloat16", "float16", "float32")),
    "compression_factor": Flag(int, 4),
    "topk": Flag(int, 16),
    "neighborhood_size": Flag(int, 2),
    "context_size": Flag(int, 2),
    "similarity_fn": Flag(str, "l2", ("l2", "dot")),
    "global_cache": Flag(bool, False),
    "retrieval_map": Flag(str),
    "cache_layers": Flag(str),  # which it had instead: layers that look up what they store
    "attention_layers": Flag(str),
}
