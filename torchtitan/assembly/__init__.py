"""A job's parts, made of its configuration: model, optimizers, data, guards, metrics."""
