"""The examples of the configuration reference that users of Levanter know, as they stand there."""

from __future__ import annotations

EXAMPLES = {
    "a whole run": """
data:
  train_urls:
    - "gs://my_bucket/openwebtext-sharded/openwebtext_train.{1..128}-of-128.jsonl.gz"
  validation_urls:
    - "gs://my_bucket/openwebtext-sharded/openwebtext_val.{1..8}-of-8.jsonl.gz"
  cache_dir: "gs://my_bucket/tokenized/openwebtext_2/"
model:
  type: gpt2
  hidden_dim: 768
  num_heads: 12
  num_layers: 12
  seq_len: 1024
  gradient_checkpointing: true
  scale_attn_by_inverse_layer_idx: true
trainer:
  tracker:
    type: wandb
    project: "levanter"
    tags: [ "openwebtext", "gpt2"]

  mp: p=f32,c=bfloat16
  model_axis_size: 1
  per_device_parallelism: 4

  train_batch_size: 512
optimizer:
  learning_rate: 6E-4
  weight_decay: 0.1
  min_lr_ratio: 0.1
""",
    "an included file": """
data: !include data.yaml
trainer:
  num_train_steps: 1000000
""",
    "steps to keep": """
trainer:
  checkpointer:
    keep:
      - every: 1000  # steps
        until: 10000 # step
      - every: 5000  # steps
        until: 40000 # step
      - every: 10000
""",
    "the compilation cache": """
trainer:
  jax_compilation_cache_dir: "/path/to/your/jax_cache" # Or "gs://your-bucket/jax_cache"
  # To set other JAX compilation cache options or any other JAX global flag:
  jax_config:
    jax_persistent_cache_min_compile_time_secs: 5.0
    jax_persistent_cache_min_entry_size_bytes: 1024
    jax_persistent_cache_enable_xla_caches: "all" # or "xla_gpu_kernel_cache_file", etc.
""",
    "wandb": """
trainer:
  tracker:
    type: wandb
    project: my-project
    entity: my-entity
""",
    "a tracker without a type": """
trainer:
  tracker:
    project: my-project
    entity: my-entity
""",
    "tensorboard": """
trainer:
  tracker:
    type: tensorboard
    logdir: logs
""",
    "several trackers": """
trainer:
  tracker:
    - type: wandb
      project: my-project
      entity: my-entity
    - type: tensorboard
      logdir: logs
""",
    "several trackers, one without a type": """
trainer:
  tracker:
    - project: my-project
      entity: my-entity
    - type: tensorboard
      logdir: logs
""",
    "averaged weights": """
trainer:
  model_averaging:
    type: ema # or 'ema_decay_sqrt'
""",
    "the other average": """
trainer:
  model_averaging:
    type: ema_decay_sqrt
""",
    "weights that decay": r"""
optimizer:
  weight_decay_modules: ".*attn.*weight|.*mlp.*weight|.*token_embeddings|.*position_embeddings"
""",
    "cycles by their ends": """
trainer:
  num_train_steps: 60000
optimizer:
  cycles: [10000, 25000, 50000]
""",
    "llama_small_fast.yaml": """
data:
  train_urls:
      - "gs://pubmed-mosaic/openwebtext-sharded/openwebtext_train.{1..128}-of-128.jsonl.gz"
  validation_urls:
      - "gs://pubmed-mosaic/openwebtext-sharded/openwebtext_val.{1..8}-of-8.jsonl.gz"
  cache_dir: "gs://pubmed-mosaic/tokenized/openwebtext/"
model:
  type: llama
  hidden_dim: 768
  intermediate_dim: 2048
  num_heads: 12
  num_kv_heads: 12
  num_layers: 12
  seq_len: 1024
  gradient_checkpointing: true
trainer:
  tracker:
    type: wandb
    project: "levanter"
    tags: [ "openwebtext", "llama" ]

  mp: p=f32,c=bfloat16
  model_axis_size: 1
  per_device_parallelism: 4

  train_batch_size: 512
optimizer:
  learning_rate: 6E-4
  weight_decay: 0.1
  min_lr_ratio: 0.1
""",
}

INCLUDED = """
train_urls:
  - "gs://my_bucket/openwebtext-sharded/openwebtext_train.{1..128}-of-128.jsonl.gz"
validation_urls:
  - "gs://my_bucket/openwebtext-sharded/openwebtext_val.{1..8}-of-8.jsonl.gz"
cache_dir: "gs://my_bucket/tokenized/openwebtext_2/"
"""
"""`data.yaml`."""
