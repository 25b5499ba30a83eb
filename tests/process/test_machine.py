"""Tests of binding a rank to the processors near its GPU, with a fake /sys."""

import os
import threading

import pytest
import torch

from torchtitan.process import distributed
from torchtitan.process import machine as numa
from torchtitan.process.ranks import Ranks

ADDRESS = "0001:1b:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function of (node of the device, {node: processors}) that writes /sys and returns {thread: bound
    processors}. The process may use processors 0 to 15.
    """
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(numa, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: bound.get(thread, set(range(16))), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__, raising=False)

    def write(node, lists):
        device = tmp_path / "bus/pci/devices" / ADDRESS
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        for number, processors in lists.items():
            folder = tmp_path / f"devices/system/node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{processors}\n")
        return bound

    return write


def test_all_threads_run_on_the_processors_of_the_gpus_node(machine, caplog):
    caplog.set_level("INFO")
    bound = machine(1, {0: "0-3,8-11", 1: "4-7,12,13-15,16"})
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    other = threading.Thread(target=leave.wait)
    other.start()
    bound[other.native_id] = {5}  # bound by another library before
    numa.bind_near(ADDRESS)
    leave.set()
    near = {4, 5, 6, 7, 12, 13, 14, 15}  # 16 is another process's
    assert bound[0] == bound[thread.native_id] == near and bound[other.native_id] == {5}
    assert caplog.messages == ["processors 8 of 16: those of NUMA node 1, to which the GPU belongs"]


@pytest.mark.parametrize(
    ("node", "lists"),
    [
        (-1, {0: "0-15"}),  # a single node, without a number
        (0, {0: "0-15"}),
        (1, {0: "0-7"}),  # a container that hides the other node
        (1, {0: "0-15", 1: "16-31"}),  # a node with forbidden processors
        (1, {0: "0-7", 1: ""}),  # a node of memory alone
        ("none", {}),
    ],
)
def test_nothing_is_bound_without_a_usable_node(node, lists, machine, caplog):
    caplog.set_level("INFO")
    bound = machine(node, lists)
    numa.bind_near(ADDRESS)
    numa.bind_near("0000:00:00.0")  # a device without an entry in /sys
    assert not bound and not caplog.messages


def test_a_rank_is_not_bound_to_too_few_processors(machine, caplog):
    """A rank bound to 3 of its 16 allowed processors would be slow."""
    caplog.set_level("INFO")
    bound = machine(1, {0: "0-12", 1: "13-15"})
    numa.bind_near(ADDRESS)
    assert not bound
    assert caplog.messages == ["processors: all 16; only 3 are of NUMA node 1, to which the GPU belongs"]


def test_a_node_with_a_fair_share_of_processors_is_bound(machine):
    bound = machine(1, {0: "0-1", 1: "2-3", 2: "4-7", 3: "8-15", 4: ""})
    numa.bind_near(ADDRESS)
    assert bound[0] == {2, 3}


def test_a_forbidden_binding_is_only_logged(machine, monkeypatch, caplog):
    def forbidden(thread, processors):
        raise PermissionError(1, "Operation not permitted")

    caplog.set_level("INFO")
    machine(1, {0: "0-7", 1: "8-15"})
    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    numa.bind_near(ADDRESS)
    (message,) = caplog.messages
    assert message.startswith("processors: all 16, as the system does not let a process be bound (")


def test_a_rank_is_bound_near_its_own_gpu(monkeypatch):
    devices = [type("", (), {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}) for bus in (0x1B, 0xDC)]
    addresses = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: devices[device.index])
    monkeypatch.setattr(distributed, "set_up_libraries", lambda *args: None)
    monkeypatch.setattr(numa, "bind_near", addresses.append)
    with monkeypatch.context() as patch:  # undone at once, as a fixture looks for leftover process groups
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        distributed.init(Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2), 10)
    assert addresses == ["0000:dc:00.0"]
