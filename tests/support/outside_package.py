"""An outside package with right things of each kind that `torchtitan contract` tries, and with planted faults."""

LIGHT = """
from dataclasses import replace

from torchtitan.adapters import AdapterSpec
from torchtitan.core.registry import Option
from torchtitan.losses.tasks import TaskSpec
from torchtitan.models.qwen3 import FAMILY as QWEN
from torchtitan.optimizers.spec import OptimizerSpec

SIZES = dict(dim=48, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=264)
FAMILY = replace(QWEN, sizes={"debugmodel": replace(QWEN.sizes["debugmodel"], **SIZES)})
SUMMED_TWICE = replace(FAMILY, spec="acme_titan.heavy:SUMMED_TWICE")
UNDECLARED = replace(FAMILY, spec="acme_titan.heavy:UNDECLARED")
WITHOUT_DEBUG = replace(FAMILY, sizes={"7B": FAMILY.sizes["debugmodel"]})
NORMED = OptimizerSpec(make="acme_titan.heavy:Normed", state=lambda options: 1)
GROUP_NORMED = OptimizerSpec(make="acme_titan.heavy:GroupNormed", state=lambda options: 1)
WAITING = OptimizerSpec(make="acme_titan.heavy:Waiting", state=lambda options: 1)
SHARD_NORMED = OptimizerSpec(make="acme_titan.heavy:ShardNormed", state=lambda options: 1)
LIMIT = {"limit": Option(float, 1.0, "Longest a change may be.")}
POWERED = OptimizerSpec(
    make="acme_titan.heavy:Powered", options={"power": Option(float, 1.0, "Of a length.")}, state=lambda options: 1
)
UNSAID = replace(POWERED, options={})
NO_MODULE = replace(NORMED, make="acme_titan.hevy:Normed")
NO_OPTION = replace(NORMED, options=LIMIT)
IA3 = AdapterSpec(make="tests.support.documented_adapter:IA3", options=("target", "layers"))
PARTIAL = AdapterSpec(make="acme_titan.heavy:Partial", options=("target", "layers"))
FORGETFUL = AdapterSpec(make="acme_titan.heavy:Forgetful")
PAIRS = TaskSpec("tests.support.other_families:PairMargin", 2, loss_per_token=False, whole_records=True)
LONGEST = TaskSpec("acme_titan.heavy:Longest")
NO_TASK_OPTION = replace(LONGEST, options=LIMIT)
calls = []


def given_three(p, cycles, third):
    return 1 - p


def falling(p, cycles):
    return 1 - p


def counting(p, cycles):
    calls.append(p)
    return 1 / len(calls)
"""
HEAVY = """
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tests.support.documented_adapter import IA3, IA3Linear
from tests.support.scale_adapter import ScaleAdapter
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.qwen3.model import SPEC

UNDECLARED = replace(SPEC, plan=replace(SPEC.plan, sequence=("ffn_norm",)))
inside = (*SPEC.plan.replicated, "attention_norm")
SUMMED_TWICE = replace(SPEC, plan=replace(SPEC.plan, sequence=("ffn_norm",), replicated=inside))


class Normed(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr, weight_decay=0.0))

    def length(self, grad):
        return (grad.full_tensor() if isinstance(grad, DTensor) else grad).norm()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.sub_(mean / (self.length(p.grad) + 1e-12), alpha=group["lr"])


class ShardNormed(Normed):
    def length(self, grad):
        return (grad.to_local() if isinstance(grad, DTensor) else grad).norm()


class Powered(Normed):
    def __init__(self, groups, lr, *, power):
        self.power = power
        super().__init__(groups, lr)

    def length(self, grad):
        local = grad.to_local() if self.power == 2 and isinstance(grad, DTensor) else grad
        return Normed.length(self, local) ** self.power


class GroupNormed(Normed):
    def length(self, grad):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.stack([Normed.length(self, grad) for grad in grads]).norm()


class Waiting(Normed):
    def length(self, grad):
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            dist.barrier()
        return super().length(grad)


class PartialLinear(IA3Linear):
    def tensor_placements(self, role, default):
        return {"ia3_scale": (Replicate(), Replicate())} if role == "row" else super().tensor_placements(role, default)


class Partial(IA3):
    def convert(self, model, plan):
        plan = super().convert(model, plan)
        for module in model.modules():
            if type(module) is IA3Linear:
                module.__class__ = PartialLinear
        return plan


class Forgetful(ScaleAdapter):
    def after_step(self, step, parts, optimizers):
        self.steps += 1
        for part in parts:
            for name, parameter in part.named_parameters():
                if name.endswith("scale"):
                    parameter.data.mul_(1 + 0.1 * self.steps)

    def state_dict(self):
        return {}


class Longest(SummedCrossEntropy):
    def count(self, batch):
        return 2 * int((batch["labels"] != -100).sum(1).max())
"""
ENTRIES = """
[torchtitan.models]
acme = acme_titan.light:FAMILY
summed_twice = acme_titan.light:SUMMED_TWICE
undeclared = acme_titan.light:UNDECLARED
[torchtitan.tasks]
acme_pairs = acme_titan.light:PAIRS
longest = acme_titan.light:LONGEST
[torchtitan.optimizers]
Normed = acme_titan.light:NORMED
GroupNormed = acme_titan.light:GROUP_NORMED
ShardNormed = acme_titan.light:SHARD_NORMED
[torchtitan.adapters]
vector = acme_titan.light:IA3
partial = acme_titan.light:PARTIAL
forgetful = acme_titan.light:FORGETFUL
[torchtitan.schedules]
straight = acme_titan.light:falling
counting = acme_titan.light:counting
"""
