"""Files of accelerate, DeepSpeed and the Trainer, with the shapes and keys of public ones, by name and format."""

from __future__ import annotations

import json

LOCAL = """\
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FILES = {
    "fsdp1.yaml": f"""\
{LOCAL}distributed_type: FSDP
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
main_process_ip: 10.0.0.4
main_process_port: 29501
mixed_precision: bf16
num_machines: 2
num_processes: 16
""",
    "fsdp2.yaml": f"""\
{LOCAL}distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: fp16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 4
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
""",
    "plugin.yaml": f"""\
{LOCAL}deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
dynamo_config: {{dynamo_backend: INDUCTOR}}
fsdp_config: {{}}
gpu_ids: 0,1,2,3
main_process_ip: null
mixed_precision: bf16
num_machines: 1
num_processes: 4
""",
    "auto.json": """\
{
\t"bf16": {"enabled": "auto"},
\t"fp16": {"enabled": "auto", "auto_cast": false, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500,
\t\t"hysteresis": 2, "min_loss_scale": 1},
\t"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
\t"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
\t\t"warmup_num_steps": "auto", "total_num_steps": "auto"}},
\t"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
\t\t"offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
\t\t"sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
\t\t"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
\t\t"stage3_gather_16bit_weights_on_model_save": true},
\t"gradient_accumulation_steps": "auto",
\t"gradient_clipping": "auto",
\t"steps_per_print": 2000,
\t"train_batch_size": "auto",
\t"train_micro_batch_size_per_gpu": "auto",
\t"wall_clock_breakdown": false
}
""",
    "alone.json": """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 10,
  "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7,
    "torch_adam": true, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 100,
    "warmup_type": "linear"}},
  "gradient_clipping": 0.0,
  "communication_data_type": "fp32",
  "data_types": {"grad_accum_dtype": "fp32"},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2,
    "min_loss_scale": 4},
  "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": false,
    "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true, "cpu_offload": true},
  "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false, "number_checkpoints": 4},
  "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1},
  "wandb": {"enabled": true, "project": "zero", "group": "a"},
  "tensorboard": {"enabled": false, "output_path": "logs"},
  "zero_allow_untested_optimizer": true,
  "prescale_gradients": false,
  "wall_clock_breakdown": true
}
""",
    "bare.json": """\
{
  "zero_force_ds_cpu_optimizer": false,
  "zero_allow_untested_optimizer": true,
  "zero_optimization": {"stage": 1, "overlap_comm": true, "max_live_parameters": 0,
    "gather_16bit_weights_on_model_save": true},
  "bf16": {"enabled": true, "check_grad_overflow": true},
  "gradient_accumulation_steps": 8,
  "train_micro_batch_size_per_gpu": 1,
  "wall_clock_breakdown": false
}
""",
    "run_clm.json": json.dumps(
        {
            "model_name_or_path": "gpt2",
            "train_file": "train.txt",
            "validation_file": "valid.txt",
            "block_size": 1024,
            "do_train": True,
            "do_eval": True,
            "output_dir": "/scratch/out/gpt2-notes",
            "overwrite_output_dir": True,
            "evaluation_strategy": "steps",
            "eval_steps": 200,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 3,
            "max_steps": 1000,
            "learning_rate": 1e-4,
            "weight_decay": 0.01,
            "warmup_steps": 100,
            "lr_scheduler_type": "constant_with_warmup",
            "optim": "adamw_torch",
            "adam_beta1": 0.9,
            "adam_beta2": 0.98,
            "adam_epsilon": 1e-6,
            "max_grad_norm": 0,
            "fp16": True,
            "fp16_opt_level": "O1",
            "seed": 7,
            "logging_steps": 50,
            "logging_first_step": True,
            "save_steps": 400,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "report_to": "tensorboard",
            "dataloader_num_workers": 4,
            "group_by_length": False,
            "ddp_timeout": 3600,
            "hub_token": "hf_abcdefghijklmnopqrstuvwxyz",
            "no_cuda": False,
        },
        indent=1,
    ),
    "sft.yaml": """\
model_name_or_path: mistralai/Mistral-7B-v0.1
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
chat_template: "{% for m in messages %}{{ m['content'] }}{% endfor %}"
dataset_mixture:
  datasets:
  - {id: HuggingFaceH4/ultrachat_200k, config: default, split: train_sft, columns: [messages], weight: 1.0}
  - {id: HuggingFaceTB/smoltalk2, config: SFT, split: everyday, columns: [messages, extra], weight: 0.5}
  test_split_size: 1000
  seed: 0
dataset_num_proc: 12
assistant_only_loss: true
bf16: true
do_eval: true
eval_strategy: epoch
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
learning_rate: 2e-5
log_level: info
logging_steps: 5
logging_strategy: steps
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_grad_norm: 0.2
max_length: 8192
max_steps: -1
num_train_epochs: 5
output_dir: data/zephyr
packing: true
packing_strategy: ffd
per_device_train_batch_size: 1
push_to_hub: true
report_to:
- wandb
run_name: zephyr-training
save_strategy: epoch
use_liger_kernel: true
warmup_ratio: 0.1
""",
    "small.yaml": """\
learning_rate: 5e-6
bf16: yes
fsdp: "full_shard auto_wrap offload"
fsdp_config: {min_num_params: 0, backward_prefetch: backward_pre, limit_all_gathers: true}
deepspeed: null
per_device_train_batch_size: 2
optim: adamw_bnb_8bit
data_seed: 3
tf32: true
torch_compile: true
save_strategy: 'no'
""",
}
FORMATS = {
    **dict.fromkeys(("fsdp1.yaml", "fsdp2.yaml", "plugin.yaml"), "accelerate"),
    **dict.fromkeys(("auto.json", "alone.json", "bare.json"), "deepspeed"),
    **dict.fromkeys(("run_clm.json", "sft.yaml", "small.yaml"), "trainer"),
}
