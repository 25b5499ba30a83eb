"""Hold families, tasks, optimizers, adapters and schedules against one device, under every plan."""
