"""Megatron-Bridge's own `pretrain()` on CPUs: a GPT of two layers, the distributed optimizer, mock data, dropout.

    bridge_pretrain.py FOLDER ITERATIONS [NAME=VALUE ...]

Saves into FOLDER every two iterations and resumes from it. NAME=VALUE are fields of Bridge's `CheckpointConfig`, in
YAML. `site/sitecustomize.py` has to be on PYTHONPATH, as for `pretrain_gpt.py`.
"""

import sys

import torch
import yaml

from tests.launch.absent import stand_in


def main(folder: str, iterations: str, *fields: str) -> None:
    stand_in(("transformer_engine", "modelopt"), ("megatron.bridge",))
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    checkpoint = {name: yaml.safe_load(value) for name, _, value in (field.partition("=") for field in fields)}
    no_fusion = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
    model = GPTModelProvider(
        transformer_layer_spec=local_layer_spec,
        normalization="LayerNorm",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=32,
        make_vocab_size_divisible_by=128,
        hidden_dropout=0.1,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **{f"{name}_fusion": False for name in no_fusion},
    )
    pretrain(
        config.ConfigContainer(
            model=model,
            train=config.TrainingConfig(
                train_iters=int(iterations), global_batch_size=8, micro_batch_size=2, exit_signal_handler=False
            ),
            validation=config.ValidationConfig(eval_interval=1000, eval_iters=0),
            optimizer=config.OptimizerConfig(optimizer="adam", use_distributed_optimizer=True, lr=1e-3, min_lr=1e-5),
            scheduler=config.SchedulerConfig(
                lr_decay_style="constant",
                lr_decay_iters=100,
                start_weight_decay=0.01,
                end_weight_decay=0.01,
                override_opt_param_scheduler=True,
            ),
            ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True, check_for_nan_in_grad=False),
            dataset=config.MockGPTDatasetConfig(
                random_seed=1,
                reset_attention_mask=False,
                reset_position_ids=False,
                eod_mask_loss=False,
                seq_length=32,
                num_dataset_builder_threads=1,
                data_sharding=True,
                dataloader_type="single",
                num_workers=0,
            ),
            logger=config.LoggerConfig(log_interval=1, tensorboard_dir=None, filter_warnings=False),
            tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000),
            checkpoint=config.CheckpointConfig(
                **{"save": folder, "load": folder, "save_interval": 2, "ckpt_format": "torch_dist", **checkpoint}
            ),
            dist=config.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
            rng=config.RNGConfig(seed=1234),
        ),
        forward_step,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
