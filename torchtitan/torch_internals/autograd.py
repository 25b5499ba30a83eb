"""The autograd engine: what a backward under way is asked, and writes that it does not see."""

import torch

graph_task_id = torch._C._current_graph_task_id
"""torch 2.13: the number of the backward under way, -1 outside of one, to leave out what a recomputation repeats."""
graph_task_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""torch 2.13: whether the backward under way may run again, so that saved tensors must not be overwritten."""
current_node = torch._C._current_autograd_node
"""torch 2.13: the node under way, None outside of a backward, to tell activations from work of backward."""
will_execute = torch._C._will_engine_execute_node
"""torch 2.13: whether the backward under way computes a node, as a split backward asks for some gradients only."""
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
"""torch 2.13: hides writes to a tensor that autograd has saved, as FSDP does where it gathers parameters."""
