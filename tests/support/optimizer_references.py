"""Optimizers as their papers write them, in float64, on whole parameters and one line after the other."""

from collections.abc import Iterable
from typing import Any

import torch

from torchtitan.core.random_draws import normal


class InFloat64:
    """`names`: of the parameters, for what tells them apart."""

    def __init__(self, parameters: Iterable[Any], lr: float, decay: float, **options: Any):
        named_parameters = [p if isinstance(p, tuple) else ("", p) for p in parameters]
        self.names, self.parameters = [name for name, _ in named_parameters], [p for _, p in named_parameters]
        self.lr, self.decay, self.options = lr, decay, options
        self.states: list[dict[str, Any]] = [{} for _ in self.parameters]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, parameter, state in zip(self.names, self.parameters, self.states, strict=True):
            if parameter.grad is not None:
                weight, gradient = parameter.double(), parameter.grad.double()
                change = self.change(name, weight, gradient, state)
                parameter.copy_(weight * (1 - self.lr * self.decay) - change)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def change(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError

    def adam(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """arXiv:1412.6980, algorithm 1."""
        beta1, beta2, eps = (self.options[key] for key in ("beta1", "beta2", "eps"))
        state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * gradient
        state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
        state["t"] = state.get("t", 0) + 1
        m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
        return m / (v.sqrt() + eps)


class AdamW(InFloat64):
    def change(self, name, weight, gradient, state):
        return self.lr * self.adam(gradient, state)


class Lion(InFloat64):
    """arXiv:2302.06675, algorithm 2."""

    def change(self, name, weight, gradient, state):
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        mean = state.get("m", torch.zeros_like(gradient))
        state["m"] = beta2 * mean + (1 - beta2) * gradient
        return self.lr * torch.sign(beta1 * mean + (1 - beta1) * gradient)


class Adafactor(InFloat64):
    """arXiv:1804.04235, algorithms 4 and 5 with rho = lr, whatever the weights' size; section 8 for the mean."""

    def change(self, name, weight, gradient, state):
        beta2 = 1 - self.count**-0.8
        square = gradient**2 + 1e-30
        if gradient.dim() < 2:
            state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * square
            v = state["v"]
        else:
            state["rows"] = beta2 * state.get("rows", 0) + (1 - beta2) * square.mean(1)
            state["columns"] = beta2 * state.get("columns", 0) + (1 - beta2) * square.mean(0)
            v = torch.outer(state["rows"], state["columns"]) / state["rows"].mean()
        update = gradient / v.sqrt()
        update = self.lr * update / max(1.0, update.square().mean().sqrt().item())
        state["m"] = self.options["beta1"] * state.get("m", 0) + (1 - self.options["beta1"]) * update
        return state["m"]


class Muon(InFloat64):
    """The post's five iterations, for what `matrix` says of a parameter; AdamW for the others."""

    def change(self, name, weight, gradient, state):
        if gradient.dim() != 2:
            return self.lr * self.adam(gradient, state)
        momentum = self.options["momentum"]
        state["m"] = momentum * state.get("m", 0) + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * state["m"]
        x = x / x.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return self.lr * 0.2 * max(gradient.shape) ** 0.5 * x


class GaLore(InFloat64):
    """arXiv:2403.03507, algorithm 2, on the short side of each matrix, at a scale of a quarter."""

    def change(self, name, weight, gradient, state):
        if gradient.dim() != 2:
            return self.lr * self.adam(gradient, state)
        tall = gradient.shape[0] >= gradient.shape[1]
        wide_gradient = gradient if tall else gradient.T
        if (self.count - 1) % self.options["gap"] == 0:
            basis = torch.linalg.svd(wide_gradient)[2][: self.options["rank"]]
            largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
            state["basis"] = basis * largest.sign()
        change = self.lr * 0.25 * self.adam(wide_gradient @ state["basis"].T, state) @ state["basis"]
        return change if tall else change.T


class APOLLO(InFloat64):
    """arXiv:2412.05270, algorithm 1; the projection is drawn as the optimizer under test draws it."""

    def change(self, name, weight, gradient, state):
        if gradient.dim() != 2:
            return self.lr * self.adam(gradient, state)
        rank, (rows, columns) = self.options["rank"], gradient.shape
        tall = rows >= columns
        shape = (rank, columns) if tall else (rows, rank)
        key = f"{name}/{(self.count - 1) // self.options['gap']}"
        drawn = normal(key, (0, 0), shape, gradient.device).double() / rank**0.5
        projected = gradient @ drawn.T if tall else drawn.T @ gradient
        factors = self.adam(projected, state).norm(dim=int(tall), keepdim=True) / projected.norm(
            dim=int(tall), keepdim=True
        )
        step = gradient * factors
        norm, most = step.norm(), 1.01 * state.get("norm", torch.inf)
        state["norm"] = min(norm, most)
        return self.lr * step * (state["norm"] / norm)
