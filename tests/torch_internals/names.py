"""What the package uses of torch's private parts: names, methods that it replaces or overrides, and attributes."""

FSDP = "torch.distributed.fsdp._fully_shard"
DCP = "torch.distributed.checkpoint"
ATEN = "torch.ops.aten"
COLLECTIVE = "torch.ops._c10d_functional"
QKV = "query key value"
NAMES: dict[str, str | None] = {
    # autograd
    "torch._C._current_graph_task_id": None,
    "torch._C._autograd._get_current_graph_task_keep_graph": None,
    "torch._C._current_autograd_node": None,
    "torch._C._will_engine_execute_node": None,
    "torch.autograd._unsafe_preserve_version_counter": "tensors",
    # collectives and process groups
    f"{COLLECTIVE}.all_gather_into_tensor": "input group_size group_name",
    f"{COLLECTIVE}.all_reduce": "input reduce_op group_name",
    f"{COLLECTIVE}.all_to_all_single": "input output_split_sizes input_split_sizes group_name",
    f"{COLLECTIVE}.reduce_scatter_tensor": "input reduce_op group_size group_name",
    f"{COLLECTIVE}.wait_tensor": "tensor",
    "torch.distributed._functional_collectives.all_reduce": "self reduceOp group",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": None,
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "group_name",
    "torch.distributed.distributed_c10d._set_pg_timeout": "timeout group",
    "torch.distributed.distributed_c10d._resolve_process_group": None,
    "torch.distributed.distributed_c10d._world.pg_map": None,
    "torch._C._ensureCUDADeviceGuardSet": None,
    "torch._C._distributed_c10d._dump_fr_trace_json": None,
    "torch.testing._internal.distributed.fake_pg.FakeStore": None,
    # the compiler
    "torch._functorch.config.activation_memory_budget": None,
    "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint": None,
    "torch._dynamo.exc.FailOnRecompileLimitHit": None,
    "torch._dynamo.exc.TorchDynamoException": None,
    "torch._inductor.config._micro_pipeline_tp": None,
    # dispatch modes, fake tensors and trees
    "torch._ops.OpOverload": None,
    "torch._subclasses.fake_tensor.FakeTensor": None,
    "torch._subclasses.fake_tensor.FakeTensorMode": "* allow_non_fake_inputs",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "",
    "torch._subclasses.fake_tensor.DataDependentOutputException": None,
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": None,
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": None,
    "torch.utils._python_dispatch.TorchDispatchMode": "",
    "torch.utils._python_dispatch._disable_current_modes": "",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode": "",
    "torch.utils._pytree.tree_iter": "tree",
    "torch.utils._pytree.tree_leaves": "tree",
    "torch.utils._pytree.tree_map_only": "type_or_types_or_pred func tree",
    # checkpoints
    f"{DCP}.api._is_wrapped_exception": "obj",
    f"{DCP}.filesystem._StorageInfo": "relative_path offset length transform_descriptors",
    f"{DCP}.filesystem._StoragePrefix": "prefix",
    f"{DCP}.filesystem._item_size": "item",
    f"{DCP}.filesystem._write_files_from_queue": (
        "create_stream file_queue result_queue planner transforms inflight_threshhold use_fsync thread_count "
        "serialization_format"
    ),
    f"{DCP}.utils._DistWrapper": "group use_dist coordinator_rank",
    f"{DCP}.state_dict_loader._DistWrapper": "group use_dist coordinator_rank",
    f"{DCP}.state_dict_saver._DistWrapper": "group use_dist coordinator_rank",
    **{
        f"{DCP}.planner.SavePlanner._cached_{name}": None
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata")
    },
    # DTensor and meshes
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "global_shape mesh placements",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": (
        "global_shape mesh_shape my_coordinate placements"
    ),
    "torch.distributed.tensor.placement_types._StridedShard": "dim * split_factor",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "",
    # FSDP2
    f"{FSDP}._fsdp_param_group.FSDPParamGroup": None,
    f"{FSDP}._fsdp_param.FSDPParam": None,
    f"{FSDP}._fsdp_param.alloc_storage": "tensor",
    f"{FSDP}._fsdp_common.HSDPMeshInfo": None,
    f"{FSDP}._fsdp_common.TrainingState.FORWARD": None,
    f"{FSDP}._fsdp_common.TrainingState.PRE_BACKWARD": None,
    f"{FSDP}._fsdp_collectives.DefaultAllGather": "",
    f"{FSDP}._fsdp_collectives.DefaultReduceScatter": "",
    f"{FSDP}._fsdp_init._get_post_forward_mesh_info": "reshard_after_forward mesh_info",
    # memory
    "torch.cuda._pin_memory_utils.pin_memory": "data_ptr size",
    "torch.cuda._pin_memory_utils.unpin_memory": "data_ptr",
    "torch.cuda.memory._record_memory_history": "enabled",
    "torch.cuda.memory._dump_snapshot": "filename",
    # operators
    "torch._foreach_mul_": None,
    "torch._foreach_norm": None,
    "torch._scaled_mm": None,
    f"{ATEN}._grouped_mm": "self mat2 offs",
    f"{ATEN}._scaled_mm": "self mat2 scale_a scale_b",
    f"{ATEN}._local_scalar_dense": "self",
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu": f"{QKV} dropout_p is_causal * attn_mask scale",
    f"{ATEN}._scaled_dot_product_flash_attention_for_cpu_backward": (
        f"grad_out {QKV} out logsumexp dropout_p is_causal * attn_mask scale"
    ),
    f"{ATEN}._scaled_dot_product_flash_attention": f"{QKV} dropout_p is_causal return_debug_mask * scale",
    f"{ATEN}._scaled_dot_product_flash_attention_backward": (
        f"grad_out {QKV} out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset"
    ),
    f"{ATEN}._scaled_dot_product_efficient_attention": f"{QKV} attn_bias compute_log_sumexp dropout_p is_causal",
    f"{ATEN}._scaled_dot_product_efficient_attention_backward": (
        f"grad_out_ {QKV} attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal"
    ),
    f"{ATEN}._scaled_dot_product_cudnn_attention": QKV + " attn_bias compute_log_sumexp",
    # pipelines
    "torch.distributed.pipelining.schedules._Action": "stage_index computation_type microbatch_index sub_actions",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": None,
    # activation checkpointing
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": None,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": "module",
    "torch.utils.checkpoint._CachingTorchDispatchMode": None,
    "torch.utils.checkpoint._CachedTorchDispatchMode": None,
    "torch.ops.profiler._record_function_enter_new.default": "name",
    "torch.ops.profiler._record_function_exit._RecordFunction": "record",
}
"""Path of a private name -> its first parameters, after which all have a default, and after * those passed by name;
None if it is not called, or is in C."""

METHODS: dict[str, dict[str, str]] = {
    f"{FSDP}._fsdp_param_group.FSDPParamGroup": {
        "finalize_backward": "",
        "post_backward": "*unused",
        "post_forward": "module input output",
        "pre_backward": "default_prefetch *unused",
        "pre_forward": "module args kwargs",
        "unshard": "async_op",
        "wait_for_unshard": "",
        "_to_unsharded": "",
    },
    f"{FSDP}._fsdp_param.FSDPParam": {
        "init_all_gather_outputs": "all_gather_input_numels all_gather_input_dtypes world_size device",
        "init_unsharded_param": "",
        "_init_extensions": "",
        "_init_sharded_post_forward_param_metadata": "param",
    },
    f"{FSDP}._fsdp_state.FSDPState": {
        "_lazy_init": "",
        "_post_forward": "module input output",
        "_pre_forward": "module args kwargs",
        "_root_post_backward_final_callback": "",
    },
    f"{FSDP}._fsdp_collectives.DefaultReduceScatter": {"allocate": "size * dtype device"},
    "torch.distributed.fsdp.FSDPModule": {"_get_fsdp_state": ""},
    "torch.distributed.device_mesh.DeviceMesh": {"_concatenate": "device_mesh_list", "_flatten": "mesh_dim_name"},
    "torch.distributed.pipelining.PipelineStage": {
        "clear_runtime_states": "",
        "get_bwd_recv_ops": "bwd_chunk_id",
        "get_bwd_send_ops": "bwd_chunk_id",
        "get_fwd_recv_ops": "fwd_chunk_id",
        "get_fwd_send_ops": "fwd_chunk_id",
        "perform_reduce_grad": "grad_scale_factor",
        "set_local_bwd_input": "next_stage_bwd_outputs mb_index",
        "set_local_fwd_input": "prev_stage_outputs mb_index",
        "_retrieve_recv_activations": "fwd_chunk_id",
        "_retrieve_recv_grads": "bwd_chunk_id",
        "_setup_backward_recv_info": "num_microbatches",
        "_setup_forward_recv_info": "num_microbatches has_backward",
    },
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": {
        "register_custom_function": "computation_type custom_function",
        "_assert_unsharded": "stage",
        "_maybe_compute_loss": "stage output target_mbs mb_index",
        "_maybe_get_loss": "stage mb_index",
        "_prepare_schedule_with_comms": "actions",
        "_split_inputs": "args kwargs",
        "_step_microbatches": "",
        "_update_losses": "stages losses",
    },
    f"{DCP}.filesystem.FileSystemWriter": {"_write_data": "planner file_queue"},
    "torch.nn.Module": {"_apply": "fn recurse"},
    "torch.utils._python_dispatch.TorchDispatchMode": {"ignore_compile_internals": "", "_should_skip_dynamo": ""},
}
"""Class of torch -> methods that the package replaces, overrides or calls -> their first parameters."""

ATTRIBUTES: dict[str, str] = {
    f"{FSDP}._fsdp_param_group.FSDPParamGroup": (
        "device fsdp_params gradient_divide_factor mesh_info post_forward_mesh_info _all_gather_result _orig_dtype "
        "_training_state"
    ),
    f"{FSDP}._fsdp_param.FSDPParam": (
        "all_gather_outputs mesh_info param_dtype post_forward_mesh_info sharded_param _module_info _orig_size "
        "_sharded_local_tensor _sharded_param_data _unsharded_param"
    ),
    f"{FSDP}._fsdp_param.ParamModuleInfo": "module param_name",
    f"{FSDP}._fsdp_common.HSDPMeshInfo": "replicate_process_group shard_mesh_size",
    f"{FSDP}._fsdp_state.FSDPState": (
        "_fsdp_param_groups _post_forward_hook_handle _pre_forward_hook_handle _training_state"
    ),
    "torch.distributed.pipelining.PipelineStage": "args_recv_info grad_recv_info group_rank stage_index_to_group_rank",
    "torch.distributed.pipelining.stage._RecvInfo": "buffer is_root_arg tensor_meta",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": (
        "bwd_recv_ops fwd_recv_ops pipeline_order pipeline_order_with_comms _n_microbatches _stages"
    ),
    f"{DCP}.default_planner.DefaultSavePlanner": "_cached_plans_key",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.library.CustomOpDef": "_init_fn _opoverload",
    "torch.nn.Module": (
        "_backward_hooks _backward_pre_hooks _compiled_call_impl _forward_hooks _forward_pre_hooks _parameters"
    ),
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.Tensor": "_post_accumulate_grad_hooks",
    "torch.UntypedStorage": "_cdata",
    "torch.utils.data.DataLoader": "_iterator",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "_shutdown_workers",
    "torch.optim.lr_scheduler.LRScheduler": "_opt_called",
    "torch._ops.OpOverload": "_schema",
    "torch.ScriptObject": "_type",
}
"""Class of torch -> attributes of its objects that the package reads or sets."""

IN_2_11 = {"_fsdp_param_group": "_fsdp_param_groups"}
"""Name in torch 2.11 -> name since then."""

OUTSIDE: dict[str, str] = {
    "datasets/loader.py": "_iterator _shutdown_workers",
    "lr_scheduling.py": "_opt_called",
    "parallelisms/pipeline/pipeline_parallel.py": "_stages",
    "parallelisms/data_parallel.py": "_all_gather_result _orig_dtype _post_accumulate_grad_hooks _to_unsharded",
    "planner/fake_cuda/kernels.py": "_schema",
    "planner/fake_cuda/step.py": "_init_fn",
    "planner/time/traffic.py": "_type",
    "training/inference_model.py": "_apply",
}
"""File -> private attributes of torch's objects that it uses itself. It only shrinks: write functions in
torch_internals instead."""
