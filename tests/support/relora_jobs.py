"""The options of a ReLoRA job."""

RELORA = {
    "adapter.kind": "lora",
    "adapter.rank": 4,
    "adapter.target": '["*attention*", "*feed_forward*"]',
    "adapter.train_dense_rest": True,
    "adapter.relora.every": 10,
    "adapter.relora.reset": "magnitude",
    "lr_scheduler.decay_type": "relora_cosine",
    "lr_scheduler.warmup_steps": 5,
    "lr_scheduler.restart_warmup_steps": 5,
    "lr_scheduler.total_steps": 40,
    "training.steps": 23,
    "optimizer.lr": 1e-2,
}
